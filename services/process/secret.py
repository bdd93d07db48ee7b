"""A credential in memory, which shows itself to nobody who did not ask for it by name.

Every way by which a value usually gets into a log or a message gives a mask: repr, str,
format, logging, exceptions, tracebacks with local variables. Every way to serialise it is an
error. `reveal` is the one way out, so it can be searched for and reviewed.
"""

from __future__ import annotations

from typing import Final, NoReturn

MASK: Final = "Secret(***)"


class Secret:
    """Bytes that must not be shown.

    Args:
        value: copied; the caller's own copy stays the caller's to forget.
    """

    __slots__ = ("__value",)

    def __init__(self, value: bytes | bytearray | memoryview) -> None:
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise TypeError("a secret is made from bytes")  # the message must not show it
        self.__value: bytearray | None = bytearray(value)

    def reveal(self) -> bytes:
        """The value itself.

        Raises:
            ValueError: it was wiped.
        """
        if self.__value is None:
            raise ValueError("this secret was wiped")
        return bytes(self.__value)

    def wipe(self) -> None:
        """Overwrites this copy. Best effort: what `reveal` gave out is beyond its reach."""
        value, self.__value = self.__value, None
        if value is not None:
            value[:] = bytes(len(value))

    def __del__(self) -> None:
        if hasattr(self, "_Secret__value"):
            self.wipe()

    def __repr__(self) -> str:
        return MASK

    def __str__(self) -> str:
        return MASK

    def __format__(self, spec: str) -> str:
        return MASK  # whatever the width, or the mask's length would follow the format

    def __eq__(self, other: object) -> bool:
        """In time that does not depend on where the two differ."""
        from hmac import compare_digest  # loads OpenSSL: not for those who never compare

        if not isinstance(other, Secret):
            return NotImplemented
        return compare_digest(self.reveal(), other.reveal())

    __hash__ = None  # type: ignore[assignment]  # a hash in a dict would compare in the open

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret is not serialised or copied")

    def __getstate__(self) -> NoReturn:
        raise TypeError("a secret is not serialised or copied")

    def __dir__(self) -> list[str]:
        return ["reveal", "wipe"]
