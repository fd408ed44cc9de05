"""Which parameter of a model each tensor of its checkpoint becomes: names in files may differ from those in modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


@dataclass(frozen=True)
class ParameterName:
    """Where a tensor of a checkpoint goes.

    Attributes:
        name: of the parameter or buffer; of none, where the model does not read the tensor.
        whole: the tensor is the parameter. False where the parameter is put together from several tensors or turned
            round on arrival, as fused experts are.
    """

    name: str
    whole: bool


def parameter_names(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, ParameterName]:
    """Name of the parameter by name of the stored tensor, by the rules that transformers loads by.

    Args:
        model: may be on the meta device.
        stored: names in the checkpoint.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    known = model.state_dict()
    names = {}
    for key in stored:
        name, converted = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        names[key] = ParameterName(name, converted is None)
    return names
