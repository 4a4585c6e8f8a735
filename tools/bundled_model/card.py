"""Renders the text of MODEL_CARD.md."""

from typing import Any

from tools.bundled_model import corpus
from tools.bundled_model.train import CONTEXT, DECAY_FROM, PHASES

LICENCES = {
    "books": (
        "134 English books of 36 authors, first published before 1924, from `mlschmitt/classic-books-markdown`",
        "public domain (United States)",
    ),
    "schema_guided": (
        "Schema-Guided Dialogue, `google-research-datasets/dstc8-schema-guided-dialogue` (Rastogi et al., AAAI 2020): "
        "task dialogues over 20 domains",
        "CC-BY-SA-4.0",
    ),
    "topical_chat": (
        "Topical-Chat, `alexa/Topical-Chat`, validation and test conversations (Gopalakrishnan et al., Interspeech "
        "2019): written chat between two people",
        "CDLA-Sharing-1.0",
    ),
    "taskmaster4": (
        "Taskmaster, TM-4-2024, `google-research-datasets/Taskmaster`: coffee orders",
        "CC-BY-4.0",
    ),
}


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def _sample(dialogues: list[list[dict[str, str]]]) -> str:
    """Render the same dialogue at both temperatures."""
    blocks = []
    for name, messages in zip(("greedy", "temperature 0.7"), dialogues, strict=True):
        lines = [f"> **{m['role']}**: {' '.join(m['content'].split())}" for m in messages]
        blocks.append(f"*{name}*\n\n" + "\n>\n".join(lines))
    return "\n\n".join(blocks)


def render(
    *,
    config: Any,
    parameters: int,
    size_bytes: int,
    counters: dict[str, float],
    hardware: str,
    perplexities: dict[str, tuple[int, int, float, float]],
    samples: list[list[list[dict[str, str]]]],
) -> str:
    """Render the card as Markdown. `perplexities`: source -> documents, tokens, perplexity per token, per byte."""
    sources = [[name, what, licence] for name, (what, licence) in LICENCES.items()]
    mixture = [
        [f"up to {min(p.until, 1):.0%}", str(p.length), *(f"{p.weights[name]:.0%}" for name in corpus.SOURCES)]
        for p in PHASES
    ]
    measured = [
        [name, f"{documents:,}", f"{tokens:,}", f"{per_token:.2f}", f"{per_byte:.3f}"]
        for name, (documents, tokens, per_token, per_byte) in perplexities.items()
    ]
    cpu_h, wall_h = counters["cpu_s"] / 3600, counters["wall_s"] / 3600
    answers = "\n\n---\n\n".join(_sample(dialogues) for dialogues in samples)
    return f"""# The bundled chat model

A {parameters / 1e6:.1f} million parameter language model that comes with Reprise, so that the server works with nothing
downloaded. It was trained from scratch, by `tools/bundled_model/train.py`, on public-domain books and openly licensed
dialogues.

**It is a demonstration, not an assistant.** It forms recognisable English sentences and can carry small talk for a few
turns. It knows next to nothing, makes things up, and forgets what it said. Its use is to exercise a real server with
real text: serve a model of your choice with `reprise serve --model DIR_OR_HUB_ID`.

## Model

| | |
|---|---|
| architecture | Llama: RoPE, grouped-query attention, SwiGLU, RMSNorm, tied embeddings |
| parameters | {parameters:,} |
| shape | {config.num_hidden_layers} layers, hidden {config.hidden_size}, intermediate {config.intermediate_size}, \
{config.num_attention_heads} heads of {config.head_dim}, {config.num_key_value_heads} key-value heads |
| context window | {config.max_position_embeddings} tokens |
| tokenizer | own byte-level BPE, {config.vocab_size:,} tokens, digits one by one |
| chat template | ChatML, roles system, user, assistant; answers end with `{corpus.TURN_END}` |
| weights | bfloat16 safetensors, {size_bytes / 1e6:.1f} MB |

## Training

{counters["step"]:,} optimizer steps over {counters["tokens"] / 1e6:.1f} million tokens: {cpu_h:.2f} hours of CPU time,
{wall_h:.2f} hours of wall time, no GPU. Hardware: {hardware}.

bfloat16 autocast, Muon for the matrices and AdamW for the rest, learning rate held, then lowered linearly over the last
{1 - DECAY_FROM:.0%} of the budget. The last part sees windows of {CONTEXT} tokens, the whole context. Half of the
dialogues open with a system message made up to fit their source. Steps in the training curve are changes of the
mixture.

{_table(["part of the budget", "window", *corpus.SOURCES], mixture)}

![Loss over tokens](loss_curve.png)

## Data

{_table(["source", "what", "licence"], sources)}

A selection of each source was used: about 90 % of the dialogues, books of 0.1 to 1.3 MB. Consecutive messages of one
speaker were joined, annotations dropped, duplicates removed, the speakers renamed to user and assistant. None of the
text is part of this repository. The two share-alike sources (Schema-Guided Dialogue, Topical-Chat) stay under their own
licences; who passes them on must do so under these. CDLA-Sharing-1.0 puts no condition on results of computing with
the data; the Creative Commons licences do not speak of trained models. If that matters to you, train on text of your
own.

About 2 % of the documents of every source (chapters, for the books) were held out, chosen by a hash of their name.

## Held-out perplexity

Measured on the exported bfloat16 weights over whole documents, chat markup included in the tokens but not in the bytes.
Documents longer than the context window are cut into windows without overlap.

{_table(["source", "documents", "tokens", "perplexity per token", "perplexity per byte"], measured)}

The task dialogues (schema_guided, taskmaster4) are formulaic, which is why they score so low; dialogues of one source
also resemble each other across the split. Read topical_chat as the figure for open small talk.

## Limits

- English only. Facts, arithmetic, code, instructions beyond a sentence: no.
- It repeats itself, contradicts itself, and claims to be a person: its data are people talking to people.
- The system message shifts the topic at most; it is no means of control.
- No safety training and no filtering beyond the choice of sources. The books are more than a hundred years old, and so
  are some of their views.
- It was never trained on more than {CONTEXT} tokens at once.

## Samples

The first answers to a fixed list of questions, not chosen from several; seed 0, at most 60 tokens each.

{answers}
"""
