"""vLLM's routes that load and unload adapters at run time, available if the engine was started with them enabled.

Clients with access to these routes can make the engine read any folder of its nodes as an adapter.
"""

from typing import Annotated

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from trimtab_engine.api.http.errors import ApiError, invalid
from trimtab_engine.api.openai.protocol import MAX_NAME_CHARACTERS
from trimtab_engine.api.openai.state import ServerState
from trimtab_engine.messages.admin import AdminReply, LoadLora, UnloadLora

MAX_PATH_CHARACTERS = 4096
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]


class LoadLoraRequest(BaseModel):
    """Body of POST /v1/load_lora_adapter."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARACTERS)]
    load_inplace: bool = False


class UnloadLoraRequest(BaseModel):
    """Body of POST /v1/unload_lora_adapter. `lora_int_id` is vLLM's numeric ID, which is not needed."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: Name
    lora_int_id: int | None = None


def adapter_router(state: ServerState) -> APIRouter:
    """Return the routes. They respond after all ranks of all cores have applied the change, or none has."""
    router = APIRouter()

    @router.post(LOAD)
    async def load(body: LoadLoraRequest) -> Response:
        _check_allowed(state, LOAD)
        if body.load_inplace:
            raise invalid("load_inplace is not supported; unload the adapter first, then load it", "load_inplace")
        if body.lora_name in state.options.served_model_names:
            raise invalid(f"{body.lora_name} is the name of the base model; rename the adapter", "lora_name")
        if "://" in body.lora_path.removeprefix("file://"):
            raise invalid("adapters are not downloaded; use a folder of the engine's node", "lora_path")
        _raise_on_failure(await state.core.call(LoadLora(body.lora_name, body.lora_path.removeprefix("file://"))))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post(UNLOAD)
    async def unload(body: UnloadLoraRequest) -> Response:
        _check_allowed(state, UNLOAD)
        _raise_on_failure(await state.core.call(UnloadLora(body.lora_name)))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def _check_allowed(state: ServerState, path: str) -> None:
    """Raise ApiError 404 if adapter updates are disabled, 503 if the engine is not serving."""
    if not state.options.allow_runtime_lora_updating:
        raise ApiError(404, f"{path} is disabled; start the engine with --enable-lora --allow-runtime-lora-updating")
    state.require_serving()


def _raise_on_failure(reply: AdminReply) -> None:
    if reply.status != 200:
        raise ApiError(reply.status, str(reply.body.get("message", reply.body)), param="lora_name")
