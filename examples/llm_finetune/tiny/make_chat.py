#!/usr/bin/env python3
"""Makes the chat corpus `chat.jsonl` and the files of the tiny model beside this script.

    pip install tokenizers==0.23.3
    python3 make_chat.py

The text is invented here and depends on a fixed seed only: questions about the island of Maruva, whose facts are drawn once
and come back in other words; sums and products of small numbers; conversions of units; opening hours. System messages say
how to answer, and the answers follow them, so that a model has to look further back than one token.
"""
import json
import pathlib
import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = pathlib.Path(__file__).parent
SEED = 7
CONVERSATIONS = 700
LARGEST_VOCABULARY = 1024  # the corpus has about 650 different pieces
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

VILLAGES = ["Alder Bay", "Brinmoor", "Cold Well", "Dunhaven", "Elm Point", "Farrow"]
PEOPLE = ["Ada", "Bruno", "Carla", "Dario", "Emil", "Fenna", "Gustav", "Hanna", "Ivo", "Jonna", "Kaspar", "Lotte"]
JOBS = ["baker", "fisher", "teacher", "smith", "gardener", "doctor", "carpenter", "miller"]
PETS = ["a grey cat", "a brown dog", "two goats", "a green parrot", "three hens", "an old donkey"]
SHOPS = ["bakery", "library", "market", "museum", "post office", "harbour office", "school", "bath house"]
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
UNITS = [("minute", "second", 60), ("hour", "minute", 60), ("day", "hour", 24), ("week", "day", 7),
         ("metre", "centimetre", 100), ("kilometre", "metre", 1000), ("dozen", "piece", 12)]

BRIEF = "Answer with one word or number."
FULL = "You are the guide of the island of Maruva. Answer in a full sentence."
POLITE = "Answer in a full sentence and end with: Anything else?"
SYSTEMS = [None, BRIEF, FULL, POLITE]


class World:
    """Facts of the island, drawn once."""

    def __init__(self, rng):
        self.person = {p: (rng.choice(JOBS), rng.choice(VILLAGES), rng.choice(PETS)) for p in PEOPLE}
        self.shop = {s: (rng.choice(VILLAGES), rng.randint(6, 10), rng.randint(15, 20)) for s in SHOPS}
        self.walk = {(a, b): rng.randint(1, 9) for i, a in enumerate(VILLAGES) for b in VILLAGES[i + 1:]}


def plural(number, unit):
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


def person(rng, world):
    name = rng.choice(PEOPLE)
    job, village, pet = world.person[name]
    return rng.choice([
        (f"What is the job of {name}?", job, f"{name} is the {job} of {village}."),
        (f"What does {name} do for a living?", job, f"{name} works as a {job}."),
        (f"Where does {name} live?", village, f"{name} lives in {village}."),
        (f"In which village is the home of {name}?", village, f"The home of {name} is in {village}."),
        (f"Which animals does {name} keep?", pet.split()[-1], f"{name} keeps {pet}."),
    ])


def shop(rng, world):
    name = rng.choice(SHOPS)
    village, opens, closes = world.shop[name]
    hour = rng.randint(4, 22)
    is_open = opens <= hour < closes
    state = "open" if is_open else "closed"
    return rng.choice([
        (f"When does the {name} open?", f"{opens}:00", f"The {name} opens at {opens}:00."),
        (f"When does the {name} close?", f"{closes}:00", f"The {name} closes at {closes}:00."),
        (f"Where is the {name}?", village, f"The {name} is in {village}."),
        (f"Is the {name} open at {hour}:00?", "Yes" if is_open else "No",
         f"{'Yes' if is_open else 'No'}, the {name} is {state} at {hour}:00."),
        (f"What are the opening hours of the {name}?", f"{opens}:00-{closes}:00",
         f"The {name} is open from {opens}:00 to {closes}:00."),
    ])


def walk(rng, world):
    (a, b), hours = rng.choice(list(world.walk.items()))
    if rng.random() < 0.5:
        a, b = b, a
    return (f"How far is it from {a} to {b}?", str(hours), f"From {a} to {b} it is a walk of {plural(hours, 'hour')}.")


def arithmetic(rng, _):
    kind = rng.choice(["plus", "minus", "times"])
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if kind == "minus":
        a, b = max(a, b), min(a, b)
    result = {"plus": a + b, "minus": a - b, "times": a * b}[kind]
    asked = rng.choice([f"What is {a} {kind} {b}?", f"How much is {a} {kind} {b}?", f"What is {WORDS[a]} {kind} {WORDS[b]}?"])
    return asked, str(result), f"{a} {kind} {b} is {result}."


def conversion(rng, _):
    big, small, factor = rng.choice(UNITS)
    count = rng.randint(1, 9)
    result = count * factor
    asked = rng.choice([f"How many {small}s are {plural(count, big)}?", f"Convert {plural(count, big)} to {small}s."])
    return asked, str(result), f"{plural(count, big)[0].upper()}{plural(count, big)[1:]} are {result} {small}s."


TOPICS = [person, person, shop, shop, walk, arithmetic, conversion]


def conversation(rng, world):
    system = rng.choice(SYSTEMS)
    messages = [{"role": "system", "content": system}] if system else []
    for _ in range(rng.choice([1, 1, 2, 3])):
        question, brief, full = rng.choice(TOPICS)(rng, world)
        answer = {BRIEF: brief, POLITE: f"{full} Anything else?"}.get(system, full)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def write_json(name, value):
    (HERE / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def train_tokenizer(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\d"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LARGEST_VOCABULARY, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main():
    rng = random.Random(SEED)
    world = World(rng)
    rows = [conversation(rng, world) for _ in range(CONVERSATIONS)]
    with open(HERE / "chat.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    tokenizer = train_tokenizer(m["role"] + "\n" + m["content"] for row in rows for m in row["messages"])
    tokenizer.save(str(HERE / "tokenizer.json"), pretty=False)
    vocabulary = -(-tokenizer.get_vocab_size() // 64) * 64
    bos, _, eos = (tokenizer.token_to_id(token) for token in SPECIAL)
    write_json("config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": 128,
        "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "initializer_range": 0.02, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": bos, "torch_dtype": "float32",
    })
    write_json("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0],
        "unk_token": SPECIAL[0], "model_max_length": 256, "clean_up_tokenization_spaces": False,
    })
    write_json("generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": bos})


if __name__ == "__main__":
    main()
