"""Finds gated MLPs and projections of one input in decoder layers of any kind, and replaces them by others that give
the same results."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

# relative error of another order of sums
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.003}


class SharedProduct:
    """A matrix product shared by several projections of the same input. The first projection called computes all; the
    others take their parts. The product keeps its input until the last part is taken, and recognises it by identity:
    any other input is computed anew. Called by the thread that runs the model."""

    def __init__(self, linear: nn.Module, sizes: list[int]) -> None:
        self._linear, self._sizes = linear, sizes
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, index: int, x: Tensor) -> Tensor:
        part = self._parts[index] if self._input is x else None
        if part is None:
            self._parts = list(self._linear(x).split(self._sizes, dim=-1))
            self._input = x
            part = self._parts[index]
            assert part is not None
        self._parts[index] = None
        if not any(p is not None for p in self._parts):
            self._input = None
        return part


class SharedPart(nn.Module):
    """A module that takes the place of one projection (such as Q of Q, K and V) whose matrix product is computed
    together with others of the same input. It returns its slice of the SharedProduct."""

    def __init__(self, shared: SharedProduct, index: int) -> None:
        super().__init__()
        self._shared, self._index = shared, index

    def forward(self, x: Tensor) -> Tensor:
        return self._shared.part(self._index, x)


def is_gated_mlp(module: nn.Module, linear: tuple[type[nn.Module], ...] = (nn.Linear,)) -> bool:
    """Return whether the parts of a module are those of down(silu(gate(x)) * up(x)). linear: the accepted types of its
    linear layers."""
    linears = [child for child in module.children() if type(child) in linear]
    return (
        len(linears) == 3
        and all(
            any(getattr(module, name, None) is m for m in linears) for name in ("gate_proj", "up_proj", "down_proj")
        )
        and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    )


def replace_child(parent: nn.Module, name: str, width: int, replacement: nn.Module) -> bool:
    """Replace a child module if `replacement` gives the same result for random rows [1, 5, width]. Returns whether it
    did."""
    child: nn.Module = getattr(parent, name)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, width, generator=generator).to(next(child.parameters()))
    if not agree(replacement(x), child(x)):
        return False
    setattr(parent, name, replacement)
    return True


def share_product(
    module: nn.Module, names: tuple[str, ...], linear: Callable[[Tensor, Tensor | None], nn.Module]
) -> bool:
    """Replace the projections `names` of a module, which have the same input, by parts of one matrix product.
    linear(weight, bias): makes that product's layer. Returns whether it did."""
    group = [m for m in (getattr(module, name, None) for name in names) if type(m) is nn.Linear]
    if len(group) < len(names) or len({m.in_features for m in group}) != 1:
        return False
    biases = [m.bias.data for m in group if m.bias is not None]
    if biases and len(biases) < len(group):
        return False
    weight = torch.cat([m.weight.data for m in group])
    shared = SharedProduct(linear(weight, torch.cat(biases) if biases else None), [m.out_features for m in group])
    for index, name in enumerate(names):
        setattr(module, name, SharedPart(shared, index))
    return True


def agree(got: Tensor, want: Tensor) -> bool:
    """Return whether two results differ only by rounding."""
    error = (got.float() - want.float()).square().mean().sqrt()
    return bool(error <= _TOLERANCE[want.dtype] * want.float().square().mean().sqrt())
