"""Converts byte-level vocabularies of GGUF files to the tokenizer files that transformers and `tokenizers` read.

A file gives only the name of the rule by which text is split before merges apply (`tokenizer.ggml.pre`). Only names
known here are accepted, because a wrong rule would give other tokens without any error.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from reprise.engine.gguf.reader import GgufFile, GgufRefused

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type for tokens that are matched as a whole in a text
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_IDS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
_IDS |= {"pad_token": "padding_token_id"}


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> Any:
    split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


SPLITS = {"gpt-2": _gpt2, "smollm": _smollm, "llama-bpe": _llama3}


def is_known(file: GgufFile) -> bool:
    """Return whether `Vocabulary` can read the file's vocabulary."""
    return file.metadata.get("tokenizer.ggml.model") == "gpt2" and file.metadata.get("tokenizer.ggml.pre") in SPLITS


class Vocabulary:
    """The vocabulary of a GGUF file whose kind of tokenizer is known (`is_known`). The constructor and methods raise
    GgufRefused if the file's vocabulary is damaged."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.tokens = self._texts("tokenizer.ggml.tokens")
        if len(set(self.tokens)) < len(self.tokens):
            raise GgufRefused(f"{file.path}: two tokens of the vocabulary are the same")
        self.special = {name: self._id(key) for name, key in _IDS.items()}
        ends = (self.special["eos_token"], self._id("eot_token_id"), self._id("eom_token_id"))
        self.end_ids = [token_id for token_id in dict.fromkeys(ends) if token_id is not None]
        self._adds_bos = file.get("tokenizer.ggml.add_bos_token", bool, False)

    def tokenizer(self) -> Tokenizer:
        pairs = [merge.split(" ") for merge in self._texts("tokenizer.ggml.merges")]
        if not all(len(pair) == 2 for pair in pairs):
            raise GgufRefused(f"{self._file.path}: a merge is of two tokens")
        merges = [(first, second) for first, second in pairs]
        kinds = self._file.get("tokenizer.ggml.token_type", list, [])
        try:
            made = Tokenizer(models.BPE(vocab={text: n for n, text in enumerate(self.tokens)}, merges=merges))
        except Exception as error:  # the library raises bare Exception
            raise GgufRefused(f"{self._file.path}: the merges do not fit the vocabulary: {error}") from None
        made.pre_tokenizer = SPLITS[self._file.get("tokenizer.ggml.pre", str)]()
        made.decoder = decoders.ByteLevel()
        whole = [(text, kind) for text, kind in zip(self.tokens, kinds, strict=False) if text]
        made.add_special_tokens([AddedToken(text, normalized=False) for text, kind in whole if kind == _CONTROL])
        made.add_tokens([AddedToken(text, normalized=False) for text, kind in whole if kind == _USER_DEFINED])
        if self._adds_bos and (bos := self.special["bos_token"]) is not None:
            begin = self.tokens[bos]
            made.post_processor = processors.Sequence(
                [
                    processors.ByteLevel(trim_offsets=False),
                    processors.TemplateProcessing(
                        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, bos)]
                    ),
                ]
            )
        return made

    def config(self, context: int) -> dict[str, Any]:
        """Return the content of tokenizer_config.json. context: the model's longest context in tokens."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
        config["clean_up_tokenization_spaces"] = False
        for name, token_id in self.special.items():
            if token_id is not None:
                config[name] = self.tokens[token_id]
        if template := self._file.get("tokenizer.chat_template", str, ""):
            config["chat_template"] = template
        return config

    def _id(self, key: str) -> int | None:
        token_id: int | None = self._file.get(f"tokenizer.ggml.{key}", int)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise GgufRefused(f"{self._file.path}: tokenizer.ggml.{key} {token_id} is no token")
        return token_id

    def _texts(self, key: str) -> list[str]:
        texts: list[str] | None = self._file.get(key, list)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise GgufRefused(f"{self._file.path}: {key} is missing, or no list of texts")
        return texts
