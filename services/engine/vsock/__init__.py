"""The virtio-vsock device of one virtual machine: a vhost-user back end of our own.

One process per machine, started before the VMM and ending with it. It joins the streams of
the guest's vsock to a Unix socket in the way of Firecracker's hybrid vsock: a client writes
``CONNECT <port>\\n``, reads ``OK <n>\\n``, and has a stream to whoever listens on that port in
the guest. Connections that the guest starts are refused.

`ring` parses the split virtqueues, `streams` knows the virtio-vsock protocol, `hybrid` the
first line of a client, `vhost` the messages of the VMM; none of them does I/O. `device` is
the loop that does, `seal` takes away its rights. See docs/vsock.md.

TRUST. The guest is hostile, and after an escape the VMM is too: every descriptor, index,
packet and message is checked after it was copied, for the guest can change its memory at any
time. Clients of the Unix socket are ours, but may be slow, silent or dead.
"""
