"""Adapters that were exported for Hugging Face's PEFT: loaded, and compared with their file."""

import pathlib

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file


def load(base, base_dir, adapter_dir):
    """Loads adapters onto `base`, which was read from `base_dir`.

    Returns the model, and the adapters' keys that PEFT misses, does not expect, or has with other values.
    """
    config = PeftConfig.from_pretrained(adapter_dir)
    assert config.base_model_name_or_path == base_dir, config
    model = PeftModel.from_pretrained(base, adapter_dir)
    # The names and values that PEFT would save are those of the file.
    expected = get_peft_model_state_dict(model)
    found = load_file(str(pathlib.Path(adapter_dir) / "adapter_model.safetensors"))
    mismatched = [name for name in expected.keys() & found.keys()
                  if not torch.equal(expected[name], found[name])]
    return model.eval(), {"missing": sorted(expected.keys() - found.keys()),
                          "unexpected": sorted(found.keys() - expected.keys()), "mismatched": mismatched}
