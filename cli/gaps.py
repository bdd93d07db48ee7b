"""The names of doctor's gaps and notes: what each means, and what to do about it.

A closed set: doctor prints no other name, and docs/doctor.md is made from this. A gap means
that something will be refused; a note is a fact that an operator should know.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Name(NamedTuple):
    meaning: str
    remedy: str  # empty: there is nothing to be done


_BWRAP: Final = "Install the package bubblewrap, 0.7 or newer."
_SETUP: Final = "Nothing yet: this version has no `setup --system`."

GAPS: Final[dict[str, Name]] = {
    "account-root": Name("Nothing that serves runs as root.", "Use an ordinary account."),
    "bwrap-missing": Name("No service can be confined, so none starts.", _BWRAP),
    "bwrap-too-old": Name("No service can be confined, so none starts.", _BWRAP),
    "cgroup-delegation-missing": Name(
        "In system mode: there is no delegated cgroup v2 for instances.", _SETUP
    ),
    "config-invalid": Name(
        "The config file has an unknown key, or a value that is none.",
        "Correct the key that the line names.",
    ),
    "config-mismatch": Name(
        "The daemon was started with another config file than this command finds.",
        "`agent-box daemon --stop`; the next verb starts one that agrees.",
    ),
    "confinement-failed": Name(
        "bubblewrap runs, and fails, or could not be tried.", "The line says why."
    ),
    "egress-unsafe": Name(
        "The data plane does not refuse what no rule allows, or cannot be made.",
        "The line says what went wrong; start nothing until it is mended.",
    ),
    "engine-accel": Name(
        "The accelerator is not chosen, or the machine does not start with it.",
        '`agent-box setup` tries them; or set `[engine] accel` to "kvm" or "tcg".',
    ),
    "engine-missing": Name(
        "The engine's program is absent, does not run, or lacks a device that we need.",
        "Install the package qemu-system-x86.",
    ),
    "helper-missing": Name(
        "The helper does not answer, so no instance can start. Without a daemon, which starts "
        "it in user mode, that is no gap.",
        "`agent-box service logs helper`, then `agent-box service restart helper`. System mode: "
        "this version has none.",
    ),
    "helper-refused": Name("The helper's socket is closed to this account.", _SETUP),
    "jail-unavailable": Name(
        "The helper could not run a program in the jail of a machine.",
        "The line has bubblewrap's words.",
    ),
    "libseccomp-missing": Name(
        "No filter of system calls can be made or loaded, so no service starts.",
        "Install the package libseccomp2.",
    ),
    "memory-max-missing": Name("The delegated cgroup has no memory controller.", _SETUP),
    "mkfs-missing": Name(
        "No data disk can be made, so no instance is created.",
        "Install the package e2fsprogs.",
    ),
    "no-kvm": Name(
        "The engine needs KVM, and /dev/kvm is missing, closed to us or does not answer.",
        "Turn on virtualization in the firmware; join the group that owns /dev/kvm.",
    ),
    "page-size-unsupported": Name("The host's pages are not 4K.", ""),
    "record-unusable": Name(
        "The registry holds a record that does not say what it must.",
        "`agent-box logs --verify` tells what the journal knows of it.",
    ),
    "runtime-dir-missing": Name(
        "XDG_RUNTIME_DIR is unset, not ours, open to others, or too long for sockets.",
        "Log in through a session that sets it.",
    ),
    "service-failed": Name(
        "A service does not answer, or stays down.",
        "`agent-box service logs NAME`, then `agent-box service restart NAME`.",
    ),
    "state-unwritable": Name("The state directory cannot be written.", "Mend what the line names."),
    "store-failed": Name("The credential store cannot be used.", "Mend what the line names."),
    "tsc-unknown": Name(
        "The time stamp counter cannot be measured, without which no machine starts under TCG.",
        "The line names what is in the way.",
    ),
    "userns-denied": Name(
        "The host forbids user namespaces, so no service can be confined.",
        "The line names the setting; for AppArmor there is `deploy/apparmor/bwrap`.",
    ),
}

NOTES: Final[dict[str, Name]] = {
    "credential-missing": Name(
        "A binding names a credential that the store does not hold.",
        "`agent-box secret set NAME`.",
    ),
    "credential-unusable": Name(
        "The store holds a credential that it cannot open.", "`agent-box secret set NAME` again."
    ),
    "discard-unsupported": Name(
        "The file system cannot punch holes: what a guest deletes frees nothing here.",
        "Put the state directory on ext4, xfs or btrfs.",
    ),
    "forward-public": Name(
        "A forward listens on an address that is not loopback: others can reach the guest's port.",
        "`agent-box forward NAME --remove PORT`, if that is not meant.",
    ),
    "helper-user-mode": Name(
        "Instances have no uid of their own and no cgroup limits.", "The system helper, later."
    ),
    "host-kernel-unvalidated": Name("Firecracker does not validate this kernel.", ""),
    "host-swap": Name(
        "The host swaps: memory of guests may reach the disk.", "Encrypt it, or switch it off."
    ),
    "image-digest-mismatch": Name(
        "A cached file is not what it was; nothing starts from it.",
        "`agent-box image verify` removes it; then build or pull the image again.",
    ),
    "image-not-pulled": Name(
        "There is no image of a variant that a profile uses.",
        "`agent-box image build VARIANT`; the line says what building lacks.",
    ),
    "image-outdated": Name(
        "An image has another version of our own code in it than this program brings.",
        "`agent-box image build VARIANT --guest`.",
    ),
    "instance-state-unknown": Name("The engine could not observe at least one instance.", ""),
    "instance-stray": Name(
        "The engine holds an instance that no record knows, and that we never deleted.",
        "It is left alone: another state directory's, or a lost database's.",
    ),
    "io-max-missing": Name("The cgroup has no io controller: disk I/O is not limited.", ""),
    "landlock-missing": Name(
        "The kernel has no Landlock: services have one wall less, and broker and netstack can "
        "reach abstract sockets.",
        "A kernel from 6.12 on.",
    ),
    "landlock-old": Name(
        "The kernel's Landlock has no scopes: broker and netstack can reach abstract sockets.",
        "A kernel from 6.12 on.",
    ),
    "nested-virtualization": Name(
        "KVM runs inside a virtual machine: for tests, never a claim about production.", ""
    ),
    "service-problem": Name("A service runs, and says that it works in part.", ""),
    "store-locked": Name("The store waits for its passphrase.", "`agent-box secret unlock`."),
}
