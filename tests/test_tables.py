"""Tables of rows as CSV files, and files that are there whole or not at all."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transform_once.files import DIGITS, as_text, atomic_path, read_rows, write_rows

words = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=8)


@given(st.lists(st.fixed_dictionaries({"name": words.filter(bool)}, optional={"a b": words, "c,d": words}), max_size=4))
def test_rows_come_back_as_text_with_nothing_where_a_row_has_no_value(tmp_path_factory, rows):
    path = write_rows(tmp_path_factory.mktemp("rows") / "table.csv", rows, comment="where it was measured")
    columns = {name for row in rows for name in row}
    assert read_rows(path) == [{name: row.get(name, "") for name in columns} for row in rows]


@given(st.floats(width=32, allow_nan=False))
def test_a_number_of_float32_survives_the_table(value):
    assert float(as_text(value)) == pytest.approx(value, rel=10.0 ** (1 - DIGITS), abs=1e-45)


def test_how_values_stand_in_a_table(tmp_path):
    assert [as_text(value, 3) for value in (None, 1234.5, 7, True, math.nan, "x")] == [
        "",
        "1.23e+03",
        "7",
        "True",
        "nan",
        "x",
    ]
    assert read_rows(tmp_path / "none.csv") == []


def test_a_file_that_could_not_be_finished_leaves_the_old_one(tmp_path):
    path = write_rows(tmp_path / "table.csv", [{"a": 1}])

    def begin():
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        begin()
    assert [file.name for file in tmp_path.iterdir()] == ["table.csv"]
    assert read_rows(path) == [{"a": "1"}]
    with pytest.raises(FileNotFoundError, match="create it first"):
        write_rows(tmp_path / "missing" / "table.csv", [])
