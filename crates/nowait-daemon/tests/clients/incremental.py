"""Brings a copy of a disk up to date through libnbd, as backup programs for QEMU do.

Usage: incremental.py URI TARGET [BITMAP]

Without BITMAP all data of the export is copied, with it what the bitmap calls dirty. Prints as JSON
how many bytes are data, and the dirty ranges.
"""

import json
import os
import sys

import nbd

ALLOCATION = "base:allocation"
# The longest request that a header of 32 bits has room for, in whole sectors.
LONGEST = (1 << 32) - 512


def connected(uri, contexts):
    h = nbd.NBD()
    for context in contexts:
        h.add_meta_context(context)
    h.connect_uri(uri)
    for context in contexts:
        assert h.can_meta_context(context), context
    return h


def extended(h):
    """Whether lengths have 64 bits; libnbd has them from 1.18 on."""
    negotiated = getattr(h, "get_extended_headers_negotiated", None)
    return negotiated is not None and negotiated()


def described(h, count, at):
    """What one request for block status says: extents (length, flags) of each context."""
    answer = {}

    def note(context, start, entries, error):
        assert start == at and error.value == 0, (start, at, error.value)
        assert context not in answer, "one answer for each context"
        pairs = entries if entries and isinstance(entries[0], tuple) else zip(entries[::2], entries[1::2])
        answer[context] = list(pairs)
        return 0

    getattr(h, "block_status_64", h.block_status)(count, at, note, 0)
    return answer


def extents(h, contexts, size):
    """All extents (start, length, flags) of each context. An answer may be shorter for one of them."""
    found = {context: [] for context in contexts}
    while (at := min(end(found[context]) for context in contexts)) < size:
        longest = size if extended(h) else LONGEST
        answer = described(h, min(longest, size - at), at)
        assert sorted(answer) == sorted(contexts), answer
        for context, entries in answer.items():
            start = at
            for length, flags in entries:
                assert length > 0, entries
                add(found[context], start, start + length, flags)
                start += length
            assert start <= size, (context, start)
    return found


def add(extents, start, stop, flags):
    """Adds an extent without what is there already; what goes on the one before becomes part of it."""
    start = max(start, end(extents))
    if start >= stop:
        return
    if extents and extents[-1][2] == flags:
        start = extents.pop()[0]
    extents.append((start, stop - start, flags))


def end(extents):
    return extents[-1][0] + extents[-1][1] if extents else 0


def copy(h, target, start, length):
    while length > 0:
        step = min(length, 32 << 20, h.get_block_size(nbd.SIZE_MAXIMUM) or length)
        os.pwrite(target, h.pread(step, start), start)
        start, length = start + step, length - step


def main():
    uri, path = sys.argv[1:3]
    contexts = [ALLOCATION] + ["qemu:dirty-bitmap:" + name for name in sys.argv[3:]]
    h = connected(uri, contexts)
    size = h.get_size()
    target = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(target, size)
    found = extents(h, contexts, size)
    assert all(end(all_of) == size for all_of in found.values()), found
    data = [(start, length) for start, length, flags in found[ALLOCATION] if not flags & nbd.STATE_ZERO]
    dirty = [(start, length) for of in contexts[1:] for start, length, flags in found[of] if flags & 1]
    for start, length in dirty if contexts[1:] else data:
        copy(h, target, start, length)
    os.close(target)
    h.shutdown()
    total = lambda ranges: sum(length for _, length in ranges)
    print(json.dumps({"data": total(data), "dirty": dirty}))


main()
