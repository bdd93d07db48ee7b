"""A kernel of a few bytes, so that a machine can be started, looked at and ended without an
image: it writes to the serial port, and then does one thing for ever.

QEMU takes it as an ELF file with a PVH entry (Xen's x86/HVM direct boot ABI): 32-bit protected
mode, flat, no paging.
"""

from __future__ import annotations

import struct

BASE = 0x100000
_PORT = 0x3F8

IDLE = bytes.fromhex("fa f4 eb fd")  # cli; hlt; jmp back to hlt
# An empty interrupt table and an exception: a triple fault, which `-no-reboot` makes an end.
EXIT = bytes.fromhex("31c0 50 50 0f011c24 cc".replace(" ", ""))
SPAM = bytes.fromhex("b023 ee ebfd".replace(" ", ""))  # mov al,'#'; out dx,al; for ever


def kernel(does: bytes = IDLE, says: str = "up\n") -> bytes:
    """The ELF file. `does` runs after it has said what it says."""
    code = bytes.fromhex("bc00002000")  # mov esp, 0x200000
    code += b"\x66\xba" + struct.pack("<H", _PORT)  # mov dx, port
    for byte in says.encode():
        code += b"\xb0" + bytes([byte]) + b"\xee"  # mov al, byte; out dx, al
    code += does
    note = struct.pack("<III4sQ", 4, 8, 18, b"Xen\0", BASE)
    header_bytes, program_bytes = 64, 56
    at_note = header_bytes + 2 * program_bytes
    at_code = 0x1000
    header = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    header += struct.pack(
        "<HHIQQQIHHHHHH", 2, 62, 1, BASE, header_bytes, 0, 0, 64, program_bytes, 2, 0, 0, 0
    )
    load = struct.pack("<IIQQQQQQ", 1, 5, at_code, BASE, BASE, len(code), len(code), 0x1000)
    notes = struct.pack("<IIQQQQQQ", 4, 4, at_note, 0, 0, len(note), len(note), 4)
    whole = header + load + notes + note
    return (whole + bytes(at_code - len(whole)) + code).ljust(8192, b"\0")
