from dataclasses import replace

import pytest

from benchmarks.paper.hybridserve import MODELS, RTX_4090, implied_flops
from reprise.loadgen.offload.allocation import allocate

BY_NAME = {model.name: model for model in MODELS}


@pytest.mark.parametrize(
    ("name", "billions"), [("opt-6.7b", 6.7), ("opt-13b", 12.9), ("opt-30b", 30.0), ("opt-66b", 65.7)]
)
def test_models_are_as_large_as_they_are_called(name, billions):
    model = BY_NAME[name]
    parameters = model.num_layers * model.layer_parameters + model.vocabulary * model.hidden
    assert parameters == pytest.approx(billions * 1e9, rel=0.02)


def test_the_implied_speed_gives_the_papers_ratio():
    model = BY_NAME["opt-30b"]
    implied = implied_flops(model, RTX_4090)["ratio"]
    assert allocate(model, replace(RTX_4090, flops=1e12 * implied)).kv_per_act == pytest.approx(2.0, rel=0.01)
