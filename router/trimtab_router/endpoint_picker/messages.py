"""Messages of Envoy's external processing protocol (envoy.service.ext_proc.v3) that an endpoint picker needs.

Protocol buffers identify fields by number, so these definitions only have the fields that are read or written; unknown
fields are ignored. They are in a package of their own, so that they can be loaded next to Envoy's generated code.
Source of names and numbers: envoy/service/ext_proc/v3/external_processor.proto and the files it imports.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

PACKAGE = "trimtab.ext_proc"
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
BODY_MODE_NONE, BODY_MODE_FULL_DUPLEX = 0, 4
"""Values of BodySendMode."""
OVERWRITE = 2
"""HeaderAppendAction: replace the header, or add it."""

SCHEMA: dict[str, tuple[str, ...]] = {
    "HeaderValue": ("string key 1", "string value 2", "bytes raw_value 3"),
    "HeaderMap": ("*HeaderValue headers 1",),
    "HeaderValueOption": ("HeaderValue header 1", "int32 append_action 3"),
    "HeaderMutation": ("*HeaderValueOption set_headers 1", "*string remove_headers 2"),
    "HttpHeaders": ("HeaderMap headers 1", "bool end_of_stream 3"),
    "HttpBody": ("bytes body 1", "bool end_of_stream 2"),
    "HttpTrailers": ("HeaderMap trailers 1",),
    "MetadataEntry": ("string key 1", "Struct value 2"),
    "Metadata": ("*MetadataEntry filter_metadata 1",),
    "ProtocolConfiguration": ("int32 request_body_mode 1", "int32 response_body_mode 2"),
    "ProcessingRequest": (
        "HttpHeaders request_headers 2 ?request",
        "HttpHeaders response_headers 3 ?request",
        "HttpBody request_body 4 ?request",
        "HttpBody response_body 5 ?request",
        "HttpTrailers request_trailers 6 ?request",
        "HttpTrailers response_trailers 7 ?request",
        "Metadata metadata_context 8",
        "bool observability_mode 10",
        "ProtocolConfiguration protocol_config 11",
    ),
    "StreamedBodyResponse": ("bytes body 1", "bool end_of_stream 2"),
    "BodyMutation": ("StreamedBodyResponse streamed_response 3",),
    "CommonResponse": ("HeaderMutation header_mutation 2", "BodyMutation body_mutation 3", "bool clear_route_cache 5"),
    "HeadersResponse": ("CommonResponse response 1",),
    "BodyResponse": ("CommonResponse response 1",),
    "TrailersResponse": ("HeaderMutation header_mutation 1",),
    "HttpStatus": ("int32 code 1",),
    "ImmediateResponse": ("HttpStatus status 1", "HeaderMutation headers 2", "bytes body 3", "string details 5"),
    "ProcessingResponse": (
        "HeadersResponse request_headers 1 ?response",
        "HeadersResponse response_headers 2 ?response",
        "BodyResponse request_body 3 ?response",
        "BodyResponse response_body 4 ?response",
        "TrailersResponse request_trailers 5 ?response",
        "TrailersResponse response_trailers 6 ?response",
        "ImmediateResponse immediate_response 7 ?response",
        "Struct dynamic_metadata 8",
    ),
}
"""Fields by message: type, name, number; `*` for repeated fields, `?NAME` for members of the oneof NAME."""
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
}


def _load() -> dict[str, Any]:
    """Return the class of each message of SCHEMA."""
    file = descriptor_pb2.FileDescriptorProto(name="trimtab_ext_proc.proto", package=PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        oneofs: list[str] = []
        for text in fields:
            kind, field_name, number, *oneof = text.split()
            label = _Field.LABEL_REPEATED if kind.startswith("*") else _Field.LABEL_OPTIONAL
            field = message.field.add(name=field_name, number=int(number), label=label)
            kind = kind.removeprefix("*")
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type = _Field.TYPE_MESSAGE
                field.type_name = ".google.protobuf.Struct" if kind == "Struct" else f".{PACKAGE}.{kind}"
            if oneof:
                if oneof[0] not in oneofs:
                    oneofs.append(oneof[0])
                    message.oneof_decl.add(name=oneof[0].removeprefix("?"))
                field.oneof_index = oneofs.index(oneof[0])
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in SCHEMA}


MESSAGES = _load()
ProcessingRequest: Any = MESSAGES["ProcessingRequest"]
ProcessingResponse: Any = MESSAGES["ProcessingResponse"]
CommonResponse: Any = MESSAGES["CommonResponse"]
HeaderMutation: Any = MESSAGES["HeaderMutation"]
