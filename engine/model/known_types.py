"""Says of every type of language model and wrapper that transformers knows whether it is served, and of those that are
not, why and what is served instead. Pure.

The verdicts are those of the load-time probe on tiny models with random weights, and a test compares them one by one.
A checkpoint's own configuration may still be refused: granitemoehybrid is served where all layers attend. Of a wrapper
the type of its text counts too. `refusals.py` beside this file judges configurations.
"""

from dataclasses import dataclass
from enum import StrEnum


class Service(StrEnum):
    """Tells whether and how a type of models is served."""

    PLAIN = "plain"
    """Served as the language model that it is."""
    WRAPPER = "wrapper"
    """Served as the language model in it, without what reads images and sounds."""
    REFUSED = "refused"
    NOT_TRIED = "not tried"
    """No tiny model of it could be made, so only loading one will tell."""


@dataclass(frozen=True, slots=True)
class KnownType:
    """The verdict on a type of models. is_movable: whether saved keys can be reused after a truncation has moved them;
    None: the type is not served. reason: why it is refused. instead: what is served in its place, as sentences."""

    service: Service
    is_movable: bool | None = None
    reason: str = ""
    instead: str = ""

    @property
    def is_served(self) -> bool:
        return self.service in (Service.PLAIN, Service.WRAPPER)


_PLAIN_MOVABLE = (
    "afmoe apertus arcee aria_text beam bitnet cohere cohere2 cohere2_moe cwm dbrx dots1 ernie4_5 "
    "ernie4_5_moe exaone4 exaone_moe fast_vlm flex_olmo flint fuyu gemma gemma2 gemma3_text glm glm4 glm4_moe "
    "gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium "
    "hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama mellum mimo_v2_flash "
    "minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 "
    "olmoe perception_lm persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open "
    "stablelm starcoder2 vaultgemma"
)
_PLAIN_FIXED = (
    "axk1 biogpt ctrl deepseek_v2 deepseek_v3 gemma3n gemma3n_text gemma4_text gemma4_unified_text "
    "glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode longcat_flash mistral4 opt youtu"
)
_WRAPPER_MOVABLE = (
    "aria aya_vision cohere2_vision cosmos3_edge cosmos3_omni deepseek_vl deepseek_vl_hybrid ernie4_5_vl_moe "
    "exaone4_5 gemma3 glm46v glm4v glm4v_moe glm_ocr glmga got_ocr2 granite4_vision granite_docling "
    "hyperclovax_vision_v2 idefics2 idefics3 internvl janus lighton_ocr llava llava_next llava_next_video "
    "llava_onevision mistral3 moss_transcribe_diarize muse_glimmer paddleocr_vl paligemma pp_chart2table "
    "qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe "
    "smolvlm step3p7 unlimited_ocr video_llama_3 video_llava vipllava"
)
_WRAPPER_FIXED = "gemma4 gemma4_unified kimi_k25"
_NOT_TRIED = (
    "blt chameleon cohere_compass cohere_compass_text deepseek_ocr2 gemma4_assistant "
    "gemma4_unified_assistant molmo2 muse_spark ovis2 phi4_multimodal"
)

_REFUSED: tuple[tuple[str, str, str], ...] = (
    (
        "its layers keep a state besides K and V, and reused history would be wrong",
        "Models whose layers all attend are served: qwen3, llama or gemma3, for example.",
        (
            "bailing_hybrid bamba falcon_h1 falcon_mamba inkling2 inkling2_text inkling_mm_model inkling_text jamba "
            "kimi_linear lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl mamba mamba2 minicpm_ocr minicpmv4_6 minicpmv4_7 minimax "
            "nemotron_h nemotron_h_omni olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next "
            "recurrent_gemma rwkv xlstm zamba zamba2 zaya"
        ),
    ),
    (
        "its layers choose which tokens they read",
        "Models that read all tokens of their context are served: glm4_moe, qwen3_moe or minimax_m2, for example.",
        (
            "axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm5_next glm_moe_dsa hy_v4 minimax_m3_vl "
            "minimax_m3_vl_text mistral_large4 qwen4_exp qwen4_exp_text"
        ),
    ),
    (
        "it attends in chunks",
        "Models that read all tokens of their context are served: qwen3_moe or gpt_oss, for example.",
        "llama4 llama4_text",
    ),
    (
        "it is an encoder with a decoder, and only causal language models are served",
        "Models that continue one text are served: qwen3 or llama, for example.",
        (
            "bart bigbird_pegasus blenderbot blenderbot-small florence2 marian mbart musicgen musicgen_melody mvp "
            "pegasus pix2struct plbart pp_formulanet prophetnet t5gemma2 udop vision-encoder-decoder whisper"
        ),
    ),
    (
        "it reads its text in both directions, so it cannot go on from saved history",
        "Models that write answers are served: qwen3 or llama, for example.",
        (
            "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
            "roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod"
        ),
    ),
    (
        "it wants an image, or another input, with every text",
        "Wrappers that read text alone are served: qwen3_vl, gemma3 or mistral3, for example.",
        "blip blip-2 evolla idefics instructblip instructblipvideo kosmos-2 pi0",
    ),
    (
        "it changes keys after they were rotated, which saved keys would miss",
        "Models of its size are served: qwen3, llama or gemma3, for example.",
        "hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl",
    ),
    (
        "its attention computes something that ours does not",
        "Models of its size are served: qwen3, llama or gemma3, for example.",
        "diffllama diffusion_gemma doge hrm_text minicpm3 mllama moshi",
    ),
    (
        "its attention bypasses transformers' attention interface",
        "Newer models of its size are served: qwen3, llama or gemma3, for example.",
        "bloom codegen cpmant falcon git gpt_neo gpt_neox_japanese gptj mpt openai-gpt reformer trocr xglm",
    ),
    (
        "its positions, its names of weights or its answers are others than those of a language model",
        "Wrappers that read text alone are served: qwen3_vl, gemma3 or mistral3, for example.",
        "emu3 kosmos-2.5 shieldgemma2",
    ),
)
"""Why types are refused, what is served instead, and the types."""


def _table() -> dict[str, KnownType]:
    groups = (
        (KnownType(Service.PLAIN, True), _PLAIN_MOVABLE),
        (KnownType(Service.PLAIN, False), _PLAIN_FIXED),
        (KnownType(Service.WRAPPER, True), _WRAPPER_MOVABLE),
        (KnownType(Service.WRAPPER, False), _WRAPPER_FIXED),
        (KnownType(Service.NOT_TRIED), _NOT_TRIED),
        *((KnownType(Service.REFUSED, None, reason, instead), types) for reason, instead, types in _REFUSED),
    )
    return {name: known for known, types in groups for name in types.split()}


KNOWN_TYPES = _table()
"""Facts about each `model_type` of transformers 5.23."""
