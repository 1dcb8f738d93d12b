"""Writes and reads word pieces in fairseq's format `mmap`, by its definition, for a test.

    python fairseq_folder.py write FOLDER DTYPE TEXTS    # a folder of data; prints the texts of train as JSON
    python fairseq_folder.py read PATH                   # PATH.idx and PATH.bin; prints the texts as JSON

An index has the magic number, the version and the code of the dtype, then the number of texts, their lengths
(int32) and their offsets in bytes (int64). All numbers are little-endian.
"""

import json
import pathlib
import struct
import sys

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8, "uint32": 9, "uint64": 10}
PIECES = 90


def write_texts(path, dtype, texts):
    np.concatenate(texts).astype(np.dtype(dtype).newbyteorder("<")).tofile(f"{path}.bin")
    sizes = np.array([len(text) for text in texts], dtype="<i4")
    ends = np.cumsum(sizes, dtype="<i8") * np.dtype(dtype).itemsize
    with open(f"{path}.idx", "wb") as file:
        file.write(MAGIC + struct.pack("<QBQ", 1, CODES[dtype], len(texts)))
        file.write(sizes.tobytes())
        file.write(np.concatenate([[0], ends[:-1]]).astype("<i8").tobytes())


def read_texts(path):
    index = pathlib.Path(f"{path}.idx").read_bytes()
    assert index[:9] == MAGIC
    version, code, number = struct.unpack("<QBQ", index[9:26])
    assert version == 1
    dtype = np.dtype({code: name for name, code in CODES.items()}[code]).newbyteorder("<")
    sizes = np.frombuffer(index, "<i4", count=number, offset=26)
    pointers = np.frombuffer(index, "<i8", count=number, offset=26 + sizes.nbytes)
    assert len(index) == 26 + sizes.nbytes + pointers.nbytes
    data = np.memmap(f"{path}.bin", mode="r")
    return [np.frombuffer(data, dtype, count=size, offset=at).tolist() for size, at in zip(sizes, pointers)]


def write_folder(folder, dtype, number):
    folder.mkdir(parents=True)
    random = np.random.default_rng(1)
    for name in ["valid", "train"]:
        lengths = random.integers(0, 40, number)
        # Each text ends with fairseq's `</s>`.
        texts = [np.append(random.integers(4, 4 + PIECES, length), 2) for length in lengths]
        write_texts(folder / name, dtype, texts)
    (folder / "dict.txt").write_text("".join(f"{piece} {PIECES - piece}\n" for piece in range(PIECES)))
    return [text.tolist() for text in texts]


if __name__ == "__main__":
    if sys.argv[1] == "write":
        texts = write_folder(pathlib.Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        texts = read_texts(sys.argv[2])
    print(json.dumps(texts))
