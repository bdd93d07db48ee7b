"""What can go wrong with building and pulling. The command line tells it; no service does.

That an image is missing or corrupt is told by services too: see `manifest`.
"""

from __future__ import annotations


class ImageError(Exception):
    """One line for a person, without control characters.

    Attributes:
        exit: the code of the verb.
        kind: the reason for a program.
    """

    exit = 1
    kind = "image-failed"

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else "?" for c in message))


class HostUnfit(ImageError):
    """The host cannot build. The line says what to install or to set."""

    exit = 2
    kind = "host-unfit"


class BadMirror(ImageError):
    """What was named as a mirror is none."""

    exit = 64
    kind = "usage"


class DefinitionError(ImageError):
    """The file of a variant cannot be used. The line names the file and the key."""

    exit = 2
    kind = "config-invalid"

    def __init__(self, source: str, message: str) -> None:
        super().__init__(f"{source}: {message}")


class UnknownVariant(ImageError):
    exit = 3
    kind = "not-found"


class BuildFailed(ImageError):
    """A step failed: the network, a package that does not exist, the disk. The line has the
    words of the program."""

    kind = "build-failed"


class PullFailed(ImageError):
    """The registry did not give what was asked for. The image that was there stays."""

    kind = "pull-failed"


class NotPublished(PullFailed):
    """The registry has no such image."""

    exit = 3
    kind = "not-found"


class Untrusted(ImageError):
    """What came is not what was asked for, or nobody whom we trust has signed it."""

    kind = "image-untrusted"
