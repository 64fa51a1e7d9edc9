# SPDX-License-Identifier: Apache-2.0
"""The fields of OpenXLA's hlo.proto that NxD's trace reads, built at run time. Others survive as unknown fields."""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto
_KINDS = {"i64": _FIELD.TYPE_INT64, "str": _FIELD.TYPE_STRING, "bytes": _FIELD.TYPE_BYTES}
_PACKAGE = "xla_standin"
_file = descriptor_pb2.FileDescriptorProto(name="standin_hlo.proto", package=_PACKAGE, syntax="proto3")


def _message(title, /, **fields):
    """A message: fields as name=(number, kind), or (number, kind, True) where repeated."""
    message = _file.message_type.add(name=title)
    for name, (number, kind, *repeated) in fields.items():
        label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
        field = message.field.add(name=name, number=number, label=label)
        if kind in _KINDS:
            field.type = _KINDS[kind]
        else:
            field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    return message


_message("ShapeProto", element_type=(2, "i64"), dimensions=(3, "i64", True), tuple_shapes=(4, "ShapeProto", True))
_attributes = _message("FrontendAttributes")
_entry = _attributes.nested_type.add(name="MapEntry")
_entry.options.map_entry = True
for _name, _number in (("key", 1), ("value", 2)):
    _entry.field.add(name=_name, number=_number, type=_FIELD.TYPE_STRING, label=_FIELD.LABEL_OPTIONAL)
_attributes.field.add(
    name="map", number=1, type=_FIELD.TYPE_MESSAGE, label=_FIELD.LABEL_REPEATED,
    type_name=f".{_PACKAGE}.FrontendAttributes.MapEntry",
)  # fmt: skip
_message(
    "HloInstructionProto", name=(1, "str"), opcode=(2, "str"), shape=(3, "ShapeProto"), parameter_number=(9, "i64"),
    custom_call_target=(28, "str"), id=(35, "i64"), operand_ids=(36, "i64", True), called_computation_ids=(38, "i64", True),
    backend_config=(43, "bytes"),
)  # fmt: skip
_message(
    "HloComputationProto", name=(1, "str"), instructions=(2, "HloInstructionProto", True), id=(5, "i64"), root_id=(6, "i64")
)
_message(
    "HloModuleProto", name=(1, "str"), entry_computation_name=(2, "str"), computations=(3, "HloComputationProto", True),
    id=(5, "i64"), entry_computation_id=(6, "i64"), frontend_attributes=(19, "FrontendAttributes"),
)  # fmt: skip
_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file)
for _made in _file.message_type:
    globals()[_made.name] = message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{_made.name}"))


class HloInputOutputAliasProto:
    """Stand-in."""
