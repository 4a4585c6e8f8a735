"""Describes a model in host memory and the GPU that it is loaded to: sizes and seconds of one layer."""

from dataclasses import dataclass

_FP16 = 2


@dataclass(frozen=True, slots=True)
class OffloadedModel:
    """The shape of a decoder in fp16. Bytes and operations are those of one layer."""

    name: str
    num_layers: int
    hidden: int
    kv_width: int  # kv_heads x head_dim
    layer_parameters: float
    vocabulary: int

    @property
    def weight_bytes(self) -> float:
        return _FP16 * self.layer_parameters

    @property
    def head_bytes(self) -> float:
        """Bytes of the embedding, which is also the head and stays on the GPU."""
        return _FP16 * self.vocabulary * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in a layer."""
        return 2 * _FP16 * self.kv_width

    @property
    def act_bytes(self) -> int:
        """Bytes of the input of a layer for one token."""
        return _FP16 * self.hidden


def opt(name: str, num_layers: int, hidden: int) -> OffloadedModel:
    """Return one of OPT's models: each head has its own keys and values, and the feed-forward part is four times as
    wide."""
    return OffloadedModel(name, num_layers, hidden, hidden, 12.0 * hidden**2, 50_272)


@dataclass(frozen=True, slots=True)
class Host:
    """A GPU, its link to the host, and the host's memory. Rates are per second."""

    flops: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float  # each way
    gpu_bytes: float
    host_bytes: float
    buffer_bytes: float  # GPU memory for a mini-batch's part of a layer; there are two such buffers
    reserved_bytes: float  # GPU memory for the runtime and intermediate results

    def weights_s(self, model: OffloadedModel, on_gpu: float) -> float:
        """Return the seconds to load a layer's weights. on_gpu: the share that stays on the GPU, 0 to 1."""
        return (1 - on_gpu) * model.weight_bytes / self.link_bytes_per_s

    def load_s(self, num_bytes: float) -> float:
        return num_bytes / self.link_bytes_per_s

    def kv_gen_s(self, model: OffloadedModel, tokens: float) -> float:
        """Return the seconds to compute one layer's keys and values of `tokens` tokens from their activations."""
        compute_s = tokens * 2 * model.hidden * 2 * model.kv_width / self.flops
        return max(compute_s, tokens * (model.act_bytes + model.kv_bytes) / self.hbm_bytes_per_s)

    def forward_s(self, model: OffloadedModel, rows: int, context: float) -> float:
        """Return the seconds that a layer whose weights are loaded takes in a decode step of `rows` sequences. context:
        the sum of the sequences' lengths, in tokens."""
        products_s = max(2 * model.layer_parameters * rows / self.flops, model.weight_bytes / self.hbm_bytes_per_s)
        return products_s + context * model.kv_bytes / self.hbm_bytes_per_s

    def prefill_s(self, model: OffloadedModel, rows: int, prompt: int, on_gpu: float) -> float:
        """Return the seconds of all layers over the prompts of `rows` sequences, with weights loaded and KV stored
        meanwhile."""
        pairs = rows * prompt * prompt / 2
        compute_s = (2 * model.layer_parameters * rows * prompt + 4 * model.hidden * pairs) / self.flops
        store_s = self.load_s(rows * prompt * model.kv_bytes)
        return model.num_layers * max(compute_s, self.weights_s(model, on_gpu), store_s)

    def free_bytes(self, model: OffloadedModel) -> float:
        """Return the GPU's bytes beside two layers' weights, two mini-batches, the head and the reserve. Raises
        ValueError if there are none."""
        taken = 2 * model.weight_bytes + 2 * self.buffer_bytes + model.head_bytes + self.reserved_bytes
        if taken > self.gpu_bytes:
            raise ValueError(f"{model.name} needs {taken / 1e9:.1f} GB of a GPU of {self.gpu_bytes / 1e9:.1f}")
        return self.gpu_bytes - taken
