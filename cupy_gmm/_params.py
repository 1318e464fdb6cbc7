"""The by-value kernel arguments of `params.cuh` as packed bytes. Sizes are asserted on both sides."""

import struct

OUTPUT_TYPES = {"bfloat16": 0, "float16": 1, "float32": 2}  # OutputType
VECTOR_STORE = 1  # Flag
ACCUMULATE = 2
WHOLE_COLUMN_BLOCKS = 4
BOX_STORE = 8
TICKET_WORDS = 2  # kTicketWords
TICKET_BYTES = 4 * 10  # where the table has a ticket counter: kTicket
UNKNOWN_GROUPS = 0x7FFFFFFF  # ScheduleParams::num_groups when the weights are not known yet

# What changes from call to call stands first in a struct; what follows is packed once and kept as bytes.

# a, b, c, schedule, tickets, status, partials
PARAMS_POINTERS = struct.Struct("<7Q")
# a_row, a_col, b_group, b_row, b_col, c_group, c_row, c_col |
# rows, k, n, groups, schedule_groups, max_blocks, height, panel, chunk, c_type, flags, max_slots
PARAMS_FACTS = struct.Struct("<8q12i")

# offs, group_offset, table, zeroed; SCHEDULE_FACTS as bytes
SCHEDULE_PARAMS = struct.Struct("<4Q56s")
# offs_stride |
# groups, rows, height, split, granule, group_offset_value, num_groups, max_blocks, zeroed_words, offs_is_int64,
# by_height, offs_are_sizes
SCHEDULE_FACTS = struct.Struct("<q12i")

# sizes, offs | sizes_stride | groups, sizes_are_int64
SIZES_PARAMS = struct.Struct("<2Qq2i")

assert SIZES_PARAMS.size == 32
assert PARAMS_POINTERS.size + PARAMS_FACTS.size == 168
assert SCHEDULE_PARAMS.size == 88
assert SCHEDULE_FACTS.size == 56


def params_struct(maps: int) -> struct.Struct:
    """Tensor maps of so many bytes, the pointers of PARAMS_POINTERS, PARAMS_FACTS as bytes."""
    return struct.Struct(f"<{maps}s{PARAMS_POINTERS.format[1:]}{PARAMS_FACTS.size}s")
