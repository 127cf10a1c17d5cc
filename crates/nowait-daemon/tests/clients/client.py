"""An NBD client in plain Python: written from the specification without an NBD library.

Usage: client.py SOCKET SIZE. Leaves "plain python" at byte 1001 of the default export.
"""

import socket
import struct
import sys

IHAVEOPT, OPTION_REPLY = 0x49484156454F5054, 0x3E889045565A9
REQUEST, SIMPLE_REPLY = 0x25609513, 0x67446698
FIXED, NO_ZEROES = 1, 2
OPT_EXPORT_NAME, OPT_GO, REP_ACK, REP_INFO = 1, 7, 1, 3
READ, WRITE, DISC, FLUSH, TRIM, WRITE_ZEROES = 0, 1, 2, 3, 4, 6
EINVAL, ENOSPC = 22, 28


class Client:
    def __init__(self, path, flags):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        magic, have, server = struct.unpack(">8sQH", self.get(18))
        assert (magic, have) == (b"NBDMAGIC", IHAVEOPT) and server & flags == flags
        self.socket.sendall(struct.pack(">I", flags))

    def get(self, count):
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            assert more, "the server has closed the connection"
            data += more
        return data

    def option(self, number, data):
        self.socket.sendall(struct.pack(">QII", IHAVEOPT, number, len(data)) + data)

    def go(self):
        """Chooses the default export with NBD_OPT_GO."""
        self.option(OPT_GO, struct.pack(">IH", 0, 0))
        while True:
            magic, option, kind, length = struct.unpack(">QIII", self.get(20))
            assert (magic, option) == (OPTION_REPLY, OPT_GO)
            data = self.get(length)
            if kind == REP_ACK:
                return size
            assert kind == REP_INFO
            if data[:2] == b"\0\0":
                size = struct.unpack(">Q", data[2:10])[0]

    def export_name(self, padding):
        """Chooses the default export with NBD_OPT_EXPORT_NAME, whose answer has padding unless negotiated away."""
        self.option(OPT_EXPORT_NAME, b"")
        size, flags = struct.unpack(">QH", self.get(10))
        assert flags & 1 and self.get(padding) == bytes(padding)
        return size

    def ask(self, command, offset, length, data=b"", wanted=0):
        self.socket.sendall(struct.pack(">IHHQQI", REQUEST, 0, command, 42, offset, length) + data)
        magic, error, cookie = struct.unpack(">IIQ", self.get(16))
        assert (magic, error, cookie) == (SIMPLE_REPLY, wanted, 42), (error, wanted)
        return self.get(length) if command == READ and not error else b""


path, size = sys.argv[1], int(sys.argv[2])
ways = [
    (FIXED | NO_ZEROES, Client.go),
    (FIXED, lambda client: client.export_name(124)),
    (FIXED | NO_ZEROES, lambda client: client.export_name(0)),
    (0, lambda client: client.export_name(124)),
]
for flags, choose in ways:
    client = Client(path, flags)
    assert choose(client) == size
    client.ask(WRITE, 1001, 12, b"plain python")
    client.ask(FLUSH, 0, 0)
    assert client.ask(READ, 1000, 14)[1:13] == b"plain python"
    client.ask(WRITE, 9000, 5000, b"x" * 5000)
    client.ask(WRITE_ZEROES, 9001, 4998)
    assert client.ask(READ, 9000, 5000) == b"x" + bytes(4998) + b"x"
    client.ask(TRIM, 65536, 65536)
    client.ask(WRITE, size - 1, 2, b"xx", ENOSPC)
    client.ask(READ, size - 1, 2, wanted=EINVAL)
    client.socket.sendall(struct.pack(">IHHQQI", REQUEST, 0, DISC, 0, 0, 0))
    assert client.socket.recv(1) == b"", "an answer to NBD_CMD_DISC"
