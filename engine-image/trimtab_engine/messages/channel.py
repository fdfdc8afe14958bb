"""All messages of each direction between API servers and engine cores: one msgspec decoder reads each union.

Messages are tagged msgspec structs over ZMQ, never pickle.
"""

from trimtab_engine.messages.admin import AdminCall, AdminReply, EngineState
from trimtab_engine.messages.lifecycle import (
    CoreBusy,
    CoreFailed,
    CoreLoaded,
    CoreReady,
    CoreRetiring,
    LoadProgress,
    RetireSeen,
    Shutdown,
    StartWave,
)
from trimtab_engine.messages.requests import AbortRequests, AddRequest, ClientOutputs, ForgetMedia, StepOutputs
from trimtab_engine.messages.state_stream import NoteDispatch, ReportState

ToCore = (
    AddRequest
    | AbortRequests
    | AdminCall
    | StartWave
    | ForgetMedia
    | RetireSeen
    | ReportState
    | NoteDispatch
    | Shutdown
)
FromCore = (
    LoadProgress
    | CoreLoaded
    | CoreReady
    | CoreRetiring
    | CoreBusy
    | CoreFailed
    | StepOutputs
    | ClientOutputs
    | EngineState
    | AdminReply
    | StartWave
)
