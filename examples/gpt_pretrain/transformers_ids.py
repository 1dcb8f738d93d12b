"""Prints the ids that transformers gives a text with GPT-2's vocabulary, as JSON.

    python transformers_ids.py VOCAB_JSON MERGES_TXT TEXT_FILE
"""

import json
import sys

from transformers import GPT2Tokenizer

vocabulary, merges, file = sys.argv[1:]
text = open(file, encoding="utf-8", newline="").read()
print(json.dumps(GPT2Tokenizer(vocabulary, merges)(text)["input_ids"]))
