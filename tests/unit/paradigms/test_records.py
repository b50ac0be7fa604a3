"""Records declared once: their columns, and what follows from them elsewhere."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import numpy as np
import pytest

from hpcsync.mpi.transport import messages
from hpcsync.paradigms.records import UNTIL, Grant, PushInfo, StepInfo, Stored, columns
from hpcsync.trace.schema import SCHEMA, TABLES

GRANT = Grant(3, 7, 12, 2, 1, 0.25, 64, 24, 3, 0.5, 0.1)
PUSH_INFO = PushInfo(
    2.0,
    1,
    4,
    3,
    0.5,
    1.0,
    0.5,
    0.25,
    0.125,
    8,
    2,
    1.5,
    800,
    0.5,
    0.1,
    0.2,
    0.0625,
    0.03,
    lr=0.3,
    problem=1,
    gradient_sq=0.7,
)


class Measured(NamedTuple):
    worker: Annotated[int, Stored("<i4", "", "Worker.")]
    queue_s: Annotated[float, Stored("<f8", "s", "Time in a queue.")] = math.nan


class Undeclared(NamedTuple):
    worker: int


def test_columns_are_the_fields_in_their_order():
    assert [column.name for column in columns(Measured)] == ["worker", "queue_s"]
    assert columns(Measured)[1] == ("queue_s", "<f8", "s", "Time in a queue.")


def test_a_field_without_a_declaration_is_noticed():
    with pytest.raises(AttributeError):
        columns(Undeclared)


@pytest.mark.parametrize(("table", "record"), [("pushes", PushInfo), ("grants", Grant), ("exchanges", StepInfo)])
def test_every_field_is_a_column_of_its_table(table, record):
    assert set(columns(record)) <= set(SCHEMA[table].columns)


def through(layout, fields):
    """Return the fields after a message of this layout."""
    return layout.unpack(layout.pack(*fields))


def test_a_grant_survives_its_messages_and_its_row():
    command = messages.CommandRecord(messages.CommandKind.GRANTED, GRANT, 0.5, 0.25, 3.0, 0.9, 1, 2, 5)
    assert messages.CommandRecord.of(through(messages.COMMAND, command.fields())) == command
    row = np.array([(1, 2.0, *GRANT, -1)], TABLES["grants"])[0]
    assert Grant(*(row[name] for name in Grant._fields)) == GRANT


def test_a_push_info_survives_its_message_except_for_the_time_that_the_server_sets():
    record = through(messages.PUSH_INFO, (messages.InfoKind.PUSHED, *PUSH_INFO[1:]))
    assert PushInfo(5.0, *record[1:]) == PUSH_INFO._replace(now_s=5.0)
    assert len(set(PUSH_INFO)) > 12, "swapped fields would be seen"


def test_a_step_info_survives_its_message_and_its_row():
    step_info = StepInfo(3, 7, 2, 800, 0.5, 0.25, 0.125, 1.5, 8, 1.0, 2.25, 4, 0.75, 0.0625, 0.3, 5, 0.7, 0.6)
    record = through(messages.STEP_INFO, (messages.StepInfoKind.STEPPED, *step_info))
    assert StepInfo(*record[1:]) == step_info
    row = np.array([(9.0, *step_info)], TABLES["exchanges"])[0]
    assert StepInfo(*(row[name] for name in StepInfo._fields)) == step_info
    assert len(set(step_info)) == len(step_info), "swapped fields would be seen"


def test_a_stop_grants_nothing():
    assert GRANT.stop() == Grant(3, 7, 12, 2, 0, 0.25, local_steps=0)
    assert GRANT.stop().size == 0.0


def test_work_is_counted_in_samples_steps_or_seconds():
    assert (GRANT.size, GRANT.step_samples) == (24.0, 8)
    assert GRANT._replace(batch_size=0).size == 3.0
    assert GRANT._replace(local_steps=UNTIL).size == 0.5
    assert GRANT._replace(local_steps=UNTIL, batch_size=8).step_samples == 8


def test_the_last_local_step_is_by_number_or_by_time():
    assert [GRANT.is_done(n, 9.0) for n in (2, 3)] == [False, True]
    until = GRANT._replace(local_steps=UNTIL)
    assert [until.is_done(9, since_s) for since_s in (0.4, 0.5)] == [False, True]
