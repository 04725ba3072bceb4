"""Every version of every op has a rule or a reason for refusal, and what the rules say of versions is true."""

from __future__ import annotations

import onnx
import pytest

import svexport.graph.opsets as opsets
from svexport.graph.opsets.rules import REFUSED, RULES, _stays, schema_of

pytestmark = pytest.mark.core

VERSIONS = sorted(
    (schema.name, schema.since_version)
    for schema in onnx.defs.get_all_schemas_with_history()
    if schema.domain == "" and opsets.LOWEST < schema.since_version <= opsets.HIGHEST
)


def test_every_version_has_a_rule_or_a_reason() -> None:
    known = RULES.keys() | REFUSED.keys()
    assert [version for version in VERSIONS if version not in known] == []
    assert sorted(known - set(VERSIONS)) == []
    assert all(reason.strip() == reason and not reason.endswith(".") for reason in REFUSED.values())


@pytest.mark.parametrize(
    "key", [key for key in VERSIONS if RULES.get(key) is _stays], ids=lambda key: f"{key[0]}-{key[1]}"
)
def test_unchanged_versions_differ_by_types_only(key: tuple[str, int]) -> None:
    op_type, version = key
    before, after = schema_of(op_type, version - 1), schema_of(op_type, version)
    assert before is not None
    assert after is not None
    assert before.since_version < version

    def attributes(schema: onnx.defs.OpSchema) -> dict:
        return {
            name: (attribute.type, attribute.required, attribute.default_value.SerializeToString())
            for name, attribute in schema.attributes.items()
        }

    assert attributes(before) == attributes(after)
    for formals in ("inputs", "outputs"):
        then, now = (
            [(formal.option, formal.is_homogeneous) for formal in getattr(schema, formals)]
            for schema in (before, after)
        )
        assert then == now
