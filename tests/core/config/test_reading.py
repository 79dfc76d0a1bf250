"""Reading configurations: every notation gives the same message, and every mistake is named with its place."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from remora.config import find_config, parse_config, read_config, read_data, to_dict, to_json, to_text
from remora.config.reading import MAX_CONFIG_BYTES, Syntax
from remora.errors import ConfigError, RemoraError
from remora.proto.model_config_pb2 import TYPE_FP32, ModelConfig

FIELD = FieldDescriptor
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FIELD.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FIELD.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FIELD.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FIELD.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FIELD.CPPTYPE_FLOAT: st.floats(width=32, allow_nan=False),
    FIELD.CPPTYPE_DOUBLE: st.floats(allow_nan=False),
    FIELD.CPPTYPE_BOOL: st.booleans(),
    FIELD.CPPTYPE_STRING: st.text(max_size=5),
}


def scalar(field: Any) -> st.SearchStrategy[Any]:
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values])
    return SCALARS[field.cpp_type]


@st.composite
def messages(draw: st.DrawFn, kind: Any = ModelConfig) -> Any:
    """Any message of a kind, with a few of its fields set; oneofs end up with one member by protobuf's own rule."""
    message = kind()
    fields = list(kind.DESCRIPTOR.fields)
    for field in draw(st.lists(st.sampled_from(fields), unique_by=lambda f: f.name, max_size=4)) if fields else ():
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            key, value = inner.fields_by_name["key"], inner.fields_by_name["value"]
            for name in draw(st.lists(scalar(key), max_size=2)):
                if value.message_type is None:
                    getattr(message, field.name)[name] = draw(scalar(value))
                else:
                    getattr(message, field.name)[name].CopyFrom(draw(messages(value.message_type._concrete_class)))
        elif isinstance(field.default_value, list):
            items = messages(inner._concrete_class) if inner is not None else scalar(field)
            getattr(message, field.name).extend(draw(st.lists(items, max_size=2)))
        elif inner is not None:
            getattr(message, field.name).CopyFrom(draw(messages(inner._concrete_class)))
            getattr(message, field.name).SetInParent()
        else:
            setattr(message, field.name, draw(scalar(field)))
    return message


def printed(config: ModelConfig, syntax: Syntax) -> str:
    if syntax == "pbtxt":
        return to_text(config)
    return to_json(config).decode() if syntax == "json" else yaml.safe_dump(to_dict(config))


def refusal(text: str, syntax: Syntax) -> str:
    """Why a text called "f" is refused, "" when it is not."""
    try:
        parse_config(text, path="f", syntax=syntax)
    except ConfigError as error:
        return error.message
    return ""


@pytest.mark.parametrize("syntax", ["pbtxt", "json", "yaml"])
@given(config=messages())
def test_what_is_printed_reads_back_the_same(config: ModelConfig, syntax: Syntax) -> None:
    assert parse_config(printed(config, syntax), path="printed", syntax=syntax) == config


@pytest.mark.filterwarnings("ignore:.*invalid.* escape:DeprecationWarning")  # protobuf lets "\\{" pass, and says so
@pytest.mark.parametrize("syntax", ["pbtxt", "json", "yaml"])
@given(text=st.text(st.characters(codec="utf-8"), max_size=40) | st.text("{}[]<>:,\"'#&*-\n ainputname12", max_size=40))
def test_any_text_is_read_or_refused_as_a_configuration(text: str, syntax: Syntax) -> None:
    assert refusal(text, syntax)[:2] in ("", "f:")


@pytest.mark.filterwarnings("ignore:.*invalid.* escape:DeprecationWarning")
@pytest.mark.parametrize("syntax", ["pbtxt", "json", "yaml"])
@given(config=messages(), data=st.data())
def test_a_damaged_configuration_is_read_or_refused(config: ModelConfig, syntax: Syntax, data: st.DataObject) -> None:
    text = printed(config, syntax)
    at = data.draw(st.integers(0, len(text)))
    damaged = text[:at] + data.draw(st.sampled_from(["", "{", "}", "[", '"', "x", ":", "\n", "9"])) + text[at + 1 :]
    assert refusal(damaged, syntax)[:2] in ("", "f:")


MISTAKES: list[tuple[Syntax, str, str]] = [
    (
        "pbtxt",
        'backend: "x"\nmax_batch_sise: 3',
        "f:2: max_batch_sise: ModelConfig has no such key; did you mean 'max_batch_size'?",
    ),
    (
        "pbtxt",
        'input [ { name: "a" }, # first\n { data_typ: TYPE_INT8 } ]',
        "f:2: input[1].data_typ: ModelInput has no such key; did you mean 'data_type'?",
    ),
    (
        "pbtxt",
        "input { dims: [ 1,\n 2 ] data_type: TYPE_FLOAT32 }",
        "f:2: input[0].data_type: 'TYPE_FLOAT32' is not a DataType; did you mean 'TYPE_FP32'?",
    ),
    (
        "pbtxt",
        "optimization < cuda { graph: true } >",
        "f:1: optimization.cuda.graph: Cuda has no such key; did you mean 'graphs'?",
    ),
    ("pbtxt", 'max_batch_size: "four" name: "m"', 'f:1: max_batch_size: Couldn\'t parse integer: "four"'),
    ("pbtxt", "max_batch_size: 99999999999", "f:1: max_batch_size: Value out of range: 99999999999"),
    ("pbtxt", "instance_group { kind: 77 }", "f: instance_group[0].kind: '77' is not a Kind; it is one of KIND_AUTO, "),
    ("pbtxt", "input [ { }\n output", 'f:2: input[0]: Expected ","'),
    (
        "json",
        '{\n"backend": "x",\n"platfrom": ""}',
        "f:3: platfrom: ModelConfig has no such key; did you mean 'platform'",
    ),
    ("json", '{"input": [{},\n{"dims": [1, "x"]}]}', "f:2: input[1].dims[1]: expected a 64-bit integer, got 'x'"),
    ("json", '{"max_batch_size": 1.5}', "f:1: max_batch_size: expected a 32-bit integer, got 1.5"),
    ("json", '{"max_batch_size": true}', "f:1: max_batch_size: expected a 32-bit integer, got True"),
    ("json", '{"max_batch_size": 2147483648}', "f:1: max_batch_size: expected a 32-bit integer, got 2147483648"),
    (
        "json",
        '{"instance_group": [{"rate_limiter": {"priority": -1}}]}',
        "f:1: instance_group[0].rate_limiter.priority",
    ),
    ("json", '{"name": 5}', "f:1: name: expected text (quote it), got 5"),
    ("json", '{"input": {}}', "f:1: input: expected a list, got a map"),
    ("json", '{"metric_tags": []}', "f:1: metric_tags: expected a map, got a list"),
    ("json", '{"optimization": 1}', "f:1: optimization: expected the keys of a ModelOptimizationPolicy, got 1"),
    ("json", '{"name": "a",\n "name": "b"}', "f:2: name: the key appears twice"),
    ("json", '{"input": [{"name": "a"}, {"name": "b",\n "name": "c"}]}', "f:2: input[1].name: the key appears twice"),
    ("json", '{"name": "a",\n "name": "b"}]]', "f:2: name: the key appears twice"),
    ("json", '{"max_batch_size": 1, "maxBatchSize": 2}', "f:1: maxBatchSize: 'max_batch_size' is given already"),
    (
        "json",
        '{"dynamic_batching": {},\n"sequence_batching": {}}',
        "f:2: sequence_batching: 'dynamic_batching' is given",
    ),
    ("json", "{not json", "f:1: not JSON: "),
    ("json", "[1]", "f: expected the keys of a ModelConfig, got a list"),
    ("json", "[" * 100_000, "f:1: nested deeper than 32 levels"),
    ("json", '{"max_batch_size": ' + "9" * 5000 + "}", "f: not JSON: "),
    (
        "yaml",
        "backend: python\ninput:\n- name: x\n  dim: [1]\n",
        "f:4: input[0].dim: ModelInput has no such key; did you",
    ),
    ("yaml", "name: 2020-01-01", "f:1: name: expected text (quote it), got datetime.date(2020, 1, 1)"),
    ("yaml", "name: a\nname: b", "f:2: name: the key appears twice"),
    ("yaml", "name: x\n---\nname: y", "f:2: a second document begins"),
    ("yaml", "name: a\nb: ]", "f:2: not YAML: "),
    ("yaml", "name: !!python/object/apply:os.getcwd []", "f:1: name: expected text (quote it), got a list"),
    ("yaml", "name: !!python/name:os.getcwd ''", "f:1: not YAML: could not determine a constructor"),
    ("yaml", "input: &loop [*loop]", "f:1: input[0]: no value is anchored as 'loop'"),
    ("yaml", "[" * 1000, "f:1: "),
    ("yaml", "name: \x07", "f: not YAML: unacceptable character"),
]


@pytest.mark.parametrize(("syntax", "text", "said"), MISTAKES)
def test_a_mistake_is_named_with_file_line_key_and_the_nearest_key(syntax: Syntax, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, path="f", syntax=syntax)
    assert caught.value.message.startswith(said)


def test_a_configuration_beyond_the_size_limit_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text("#" * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        read_config(path)


def test_a_small_yaml_that_unfolds_into_a_large_one_is_refused() -> None:
    tensor = "&t {name: a, dims: &d [" + "1, " * 4000 + "]}"
    text = "input: [" + ", ".join([tensor] + ["*t"] * 100) + "]"
    with pytest.raises(ConfigError, match="more than 100000 values"):
        parse_config(text, path="f", syntax="yaml")


def test_yaml_anchors_share_a_value() -> None:
    config = parse_config("input: [&x {name: a, dims: [2]}, *x]", path="f", syntax="yaml")
    assert [list(row.dims) for row in config.input] == [[2], [2]]


def test_parameters_may_be_plain_text_numbers_or_switches() -> None:
    said = {"a": "b", "threads": 4, "fast": True, "long": {"string_value": "c"}}
    config = parse_config(json.dumps({"parameters": said}), path="f", syntax="json")
    values = {key: value.string_value for key, value in config.parameters.items()}
    assert values == {"a": "b", "threads": "4", "fast": "true", "long": "c"}


def test_json_may_be_as_protobuf_writes_it() -> None:
    text = '{"maxBatchSize": "4", "input": [{"dataType": "type_fp32", "dims": ["3", 4.0]}], "optimization": null}'
    config = parse_config(text, path="f", syntax="json")
    assert config.max_batch_size == 4
    assert config.input[0].data_type == TYPE_FP32
    assert list(config.input[0].dims) == [3, 4]
    assert not config.HasField("optimization")


def test_a_yaml_key_is_the_text_as_written() -> None:
    config = parse_config("cc_model_filenames: {7.50: model_75}", path="f", syntax="yaml")
    assert dict(config.cc_model_filenames) == {"7.50": "model_75"}


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    for name in ("config.pbtxt", "config.yaml"):
        path = tmp_path / name
        path.write_text("# nothing\n")
        assert read_config(path) == ModelConfig()


def test_a_file_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b'backend: "x"\nname: "\xff"')
    with pytest.raises(ConfigError, match=r"config\.pbtxt:2: byte 0xff is not UTF-8"):
        read_config(path)


def test_a_file_that_is_gone_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_config(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="ends in"):
        read_config(tmp_path / "config.toml")


def test_each_notation_is_found_and_absence_gives_none(tmp_path: Path) -> None:
    assert find_config(tmp_path) is None
    for name in ("config.pbtxt", "config.json", "config.yaml", "config.yml"):
        path = tmp_path / name
        path.touch()
        assert find_config(tmp_path) == path
        path.unlink()


def test_two_notations_at_once_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").touch()
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"more than one model configuration \(config.pbtxt, config.yaml\)"):
        find_config(tmp_path)


def test_a_custom_configuration_has_priority(tmp_path: Path) -> None:
    usual, custom = tmp_path / "config.pbtxt", tmp_path / "configs" / "gpu.pbtxt"
    custom.parent.mkdir()
    usual.touch()
    assert find_config(tmp_path, "gpu") == usual
    custom.touch()
    assert find_config(tmp_path, "gpu") == custom
    assert find_config(tmp_path, "cpu") == usual


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "a\\b"])
def test_a_custom_configuration_name_is_not_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="must be a plain name"):
        find_config(tmp_path, name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("../secret", "x file '../secret' leaves the model's folder 'warmup'"),
        ("/etc/hostname", "x file '/etc/hostname' leaves the model's folder 'warmup'"),
        ("link", "x file 'link' leaves the model's folder 'warmup'"),
        ("missing", "failed to open text file for read warmup/missing: No such file or directory"),
        (".", "failed to open text file for read warmup/.: Is a directory"),
        ("\0", "failed to open text file for read warmup/\0: not a file name"),
        ("large", "x file 'large' has 5000 bytes; the limit is 4999"),
    ],
)
def test_data_that_a_configuration_names_lies_in_its_folder_and_is_not_too_large(
    tmp_path: Path, name: str, text: str
) -> None:
    folder = tmp_path / "warmup"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "large").write_bytes(bytes(5000))
    with pytest.raises(RemoraError) as caught:
        read_data(folder, name, "x file", 4999)
    assert str(caught.value) == text
    assert read_data(folder, "large", "x file", 5000) == bytes(5000)


@pytest.mark.parametrize("text", ["name: 'm'\nmax_batch_size: ${size}", "backend: 'x'\ninput { data_type: TYPE_#X }"])
def test_a_template_is_refused_as_one_with_the_place_to_fill(text: str) -> None:
    with pytest.raises(ConfigError, match=r"c:2: .* must be filled in: this is a template of a configuration"):
        parse_config(text, path="c", syntax="pbtxt")


@pytest.mark.parametrize(
    ("syntax", "text", "reason"),
    [
        ("pbtxt", 'name: "' + "\\" * 200_001 + '"', "a string is not closed on its line"),
        ("pbtxt", "# it's\nname: '" + "\\'" * 100_000, "c:2: a string is not closed on its line"),
        ("yaml", "max_batch_size: " + "1:" * 100_000 + "1", "c:1: not YAML: a number has too many digits"),
        ("yaml", "max_batch_size: !!float " + "1:" * 100_000 + "1", "c:1: not YAML: a number has too many digits"),
    ],
    ids=["backslashes", "quotes", "number to the base of 60", "float to the base of 60"],
)
def test_a_text_that_takes_a_library_long_to_read_is_refused_at_once(syntax: Any, text: str, reason: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError, match=reason):
        parse_config(text, path="c", syntax=syntax)
    assert time.process_time() - began < 2.0


def test_a_long_string_that_is_closed_is_read() -> None:
    text = 'name: "it\'s # \\" ' + "x" * 10_000 + '" # "'
    assert parse_config(text, path="c", syntax="pbtxt").name.endswith("x")
