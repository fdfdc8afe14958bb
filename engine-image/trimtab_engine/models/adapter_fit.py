"""Validation that an adapter fits a model (names, shapes, ranks), and the memory estimate for adapters. Runs before
adapter weights are read; needs no torch.
"""

from pathlib import Path

from trimtab_modelspec.tensors import PROJECTION, Part, Tensors

from trimtab_engine.config.adapters import AdapterConfig
from trimtab_engine.errors import ConfigError, ModelError, NotSupportedError
from trimtab_engine.weights.adapter_files import TENSORS_FILE, PeftAdapter

NOT_ADAPTED: dict[Part, str] = {
    "experts": "experts of an MoE",
    "embedding": "the embeddings",
    "lm_head": "the output layer",
}


def check_fit(name: str, adapter: PeftAdapter, tensors: Tensors, max_rank: int) -> None:
    """Raise ConfigError unless each of its modules is one of the model's that may have an adapter, of its shape, and of
    no higher rank than there is room for. `tensors`: all of the model's.
    """
    where = f"adapter {name} ({adapter.where})"
    for target in adapter.target_modules:
        if not any(_names(target, tensor) for tensor in tensors):
            raise ModelError(
                f"{where}: target_modules has {target}, which is not a module of this model; serve it with the model "
                f"that it was trained for"
            )
    for module, shape in adapter.modules.items():
        tensor = tensors.get(module + ".weight")
        if tensor is None:
            raise ModelError(
                f"{where}: it adapts {module}, which this model does not have; serve it with the model that it was "
                f"trained for"
            )
        if tensor.part in NOT_ADAPTED:
            raise NotSupportedError(
                f"{where}: it adapts {module}, and adapters of {NOT_ADAPTED[tensor.part]} are not supported; merge "
                f"it into "
                f"the model, or train one of the other projections"
            )
        if tensor.shape != (shape.out_features, shape.in_features):
            raise ModelError(
                f"{where}: its {module} is [{shape.out_features}, {shape.in_features}], the model's is "
                f"{list(tensor.shape)}; serve it with the model that it was trained for"
            )
    if adapter.max_rank > max_rank:
        raise ConfigError(
            f"{where}: its rank is {adapter.max_rank}, above --max-lora-rank {max_rank}; raise that to "
            f"{adapter.max_rank}"
        )


def bytes_of_adapters(
    config: AdapterConfig, tensors: Tensors, item_bytes: int, *, are_of_one_rank: bool = False
) -> int:
    """Return the approximate memory of all ranks for adapters: the named files, each counted like the largest where its
    tensors pass `are_of_one_rank`; if clients can load more, room for the maximum number.
    """
    if not config.is_updatable:
        files = [Path(module.folder) / TENSORS_FILE for module in config.modules]
        sizes = [file.stat().st_size for file in files if file.exists()]  # reports missing modules by name
        return len(sizes) * max(sizes, default=0) if are_of_one_rank else sum(sizes)
    sides = sum(
        sum(tensor.shape)
        for name, tensor in tensors.items()
        if name.endswith(PROJECTION) and tensor.part not in NOT_ADAPTED and len(tensor.shape) == 2
    )
    return config.capacity * config.max_lora_rank * sides * item_bytes


def _names(target: str, tensor: str) -> bool:
    """Return True if a target's name (or name suffix) is the module of the weight tensor."""
    module = tensor.removesuffix(".weight")
    return module == target or module.endswith("." + target.removeprefix("model.language_model."))
