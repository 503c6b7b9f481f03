"""A quantiser for tests, known to diffusers by its name: it stores linear weights as bytes."""

import enum

import torch
from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin


class Method(enum.StrEnum):
    """As diffusers' own methods are named."""

    HALVING = "halving"


class HalvingConfig(QuantizationConfigMixin):
    """What `from_pretrained` takes as `quantization_config`."""

    def __init__(self, scale=0.01, **kwargs):
        self.quant_method = Method.HALVING
        self.scale = scale
        self.not_converted = []

    def to_diff_dict(self):
        return self.to_dict()


class Halves(torch.nn.Parameter):
    """Bytes, and the scale without which they mean nothing."""

    def __new__(cls, data, scale=None):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.scale = scale
        return made


class HalvingQuantizer(DiffusersQuantizer):
    """Quantises each linear layer after the load, and counts how often it has run.

    It adds to its configuration, as those of diffusers do.
    """

    is_serializable = is_trainable = False
    runs = 0

    def _process_model_before_weight_loading(self, model, **kwargs):
        self.quantization_config.not_converted.append("norm")

    def _process_model_after_weight_loading(self, model, **kwargs):
        HalvingQuantizer.runs += 1
        scale = self.quantization_config.scale
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                values = (module.weight.float() / scale).round().clamp(-128, 127)
                module.weight = Halves(values.to(torch.int8), scale)
        return model


auto.AUTO_QUANTIZER_MAPPING["halving"] = HalvingQuantizer
auto.AUTO_QUANTIZATION_CONFIG_MAPPING["halving"] = HalvingConfig
