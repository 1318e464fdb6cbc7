"""Faults to plant in Hopper's kernels, one at a time: what `test_hopper_on_cpu` holds its cases to."""

# Name -> file, a text that stands there once, its replacement.
MUTANTS: dict[str, tuple[str, str, str]] = {
    "rows of the last stage cut short": (
        "sm90/ragged.cuh",
        "if (whole) {\n        tma_load_5d(target, map, barrier, 0, kRagged + before_end,",
        "if (whole) {\n        tma_load_5d(target, map, barrier, 0, kRagged + before_end - 1,",
    ),
    "accumulate dropped": ("stores.cuh", "(p.flags & kAccumulate) != 0", "false"),
    "a stage filled too early": (
        "sm90/stage_ring.cuh",
        "begin > starts[oldest % kStageSlots] + kUnits",
        "begin > starts[oldest % kStageSlots] + 2 * kUnits",
    ),
    "tokens placed past the end of the ring": (
        "sm90/stage_ring.cuh",
        "const u32 tokens = placed<kUnits>(at, extent.tokens);",
        "const u32 tokens = at;",
    ),
    "stage released early": (
        "sm90/mainloop.cuh",
        "if (kHeld || step > 0) release_one_before(ring);",
        "if (lane_id() == 0) mbarrier_arrive(barriers.consumed(ring.slot()));",
    ),
    "too few tokens multiplied": (
        "sm90/mainloop.cuh",
        "loop<nth_extent(kFirst)>(acc, ring);",
        "loop<nth_extent(kFirst > 0 ? kFirst - 1 : 0)>(acc, ring);",
    ),
    "a sum begins with that of the tile before": (
        "sm90/grouped_mm.cuh",
        "for (int i = 0; i < kHalves * kTokens / 2; ++i) acc[i] = plain_zero();",
        "for (int i = 1; i < kHalves * kTokens / 2; ++i) acc[i] = plain_zero();",
    ),
    "products not waited for": ("sm90/mainloop.cuh", "wgmma_wait<0>();", "wgmma_wait<1>();"),
    "k step of an MN-major operand": (
        "sm90/mainloop.cuh",
        "kMTransposed ? 16 * kLineBytes / 16 : 32 / 16",
        "32 / 16",
    ),
    "claim missing": ("sm90/roles.cuh", "if (kWeights && step == claim_at) mbarrier", "if (false) mbarrier"),
    "tokens rounded down": (
        "sm90/grouped_mm.cuh",
        "sixteens = (tile.rows + 15) / 16",
        "sixteens = (tile.rows + 7) / 16",
    ),
    "a long group past the last one": (
        "sm90/row_queue.cuh",
        "is_long = before < mine.long_strips && after > before",
        "is_long = after > before",
    ),
    "more long groups handed out than there are": (
        "sm90/row_queue.cuh",
        "clamped(static_cast<i32>(handed >> 32), 0, mine.long_strips)",
        "static_cast<i32>(handed >> 32)",
    ),
    "last tiles in halves, the second left out": (
        "sm90/row_queue.cuh",
        "share(tile, past_whole % 2);",
        "share(tile, 0);",
    ),
    "last tiles of few tokens left out": ("sm90/row_queue.cuh", "else if (half == 1) {", "else {"),
    "the forward's counter left behind": (
        "sm90/row_queue.cuh",
        "const i32 tickets = 2 * mine.tiles - mine.whole;",
        "const i32 tickets = 2 * mine.tiles;",
    ),
    "no stage for zeros": ("sm90/grouped_mm.cuh", "(p.k + kTileK - 1) / kTileK : 1", "(p.k + kTileK - 1) / kTileK : 0"),
    "store past the row block": (
        "sm90/epilogue.cuh",
        "c * kStagedLines - tile.rows;",
        "c * kStagedLines - tile.rows - 1;",
    ),
    "staging filled before it is stored": (
        "sm90/epilogue.cuh",
        "if (thread == 0 && nth + 1 >= kBuffers) tma_store_wait_read<kBuffers - 2>();",
        "",
    ),
    "stores without a box not counted": (
        "sm90/epilogue.cuh",
        "if (thread == 0) tma_store_commit();",
        "if (thread == 0 && first_column(half) < p.n) tma_store_commit();",
    ),
    "held stage filled before it is stored": (
        "sm90/mainloop.cuh",
        "if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();",
        "",
    ),
    "held stage shared by warpgroups": (
        "sm90/grouped_mm.cuh",
        "units[ring.weights] + warpgroup * kHalves * kBlockBytes",
        "units[ring.weights]",
    ),
    "no turns": (
        "sm90/grouped_mm_wgrad_pingpong.cuh",
        "wait_for(barriers.turn(warpgroup)",
        "if (false) wait_for(1024u",
    ),
    "a tile read after it is forgotten": (
        "sm90/grouped_mm_wgrad_pingpong.cuh",
        "const PingpongTile tile = barriers",
        "const PingpongTile& tile = barriers",
    ),
    "a lane a round of the ring of x behind": (
        "sm90/pingpong_roles.cuh",
        "warp_sync();  // all lanes have seen the place free: once filled, two phases are told apart no more\n"
        "            if (lane_id() == 0) {\n                load_columns(target, &h.a",
        "if (lane_id() == 0) {\n                load_columns(target, &h.a",
    ),
    "a lane a round of the ring of dy behind": (
        "sm90/pingpong_roles.cuh",
        "warp_sync();  // all lanes have seen the place free: once filled, two phases are told apart no more\n"
        "            if (lane_id() == 0) {\n                load_columns(target, map",
        "if (lane_id() == 0) {\n                load_columns(target, map",
    ),
    "a gradient begins with that of the tile before": (
        "sm90/grouped_mm_wgrad_pingpong.cuh",
        "for (int i = 0; i < kCfg.m * kCfg.n / 128; ++i) acc[i] = plain_zero();",
        "for (int i = 1; i < kCfg.m * kCfg.n / 128; ++i) acc[i] = plain_zero();",
    ),
    "turn handed on while lanes wait for theirs": (
        "sm90/pingpong_mainloop.cuh",
        "warp_sync();  // all lanes have seen",
        "//",
    ),
    "last rows of a tile rounded down": ("sm90/pingpong_mainloop.cuh", "% kTileK + 15) / 16", "% kTileK) / 16"),
    "a stage of a bundle released by its last tile alone": (
        "sm90/pingpong_roles.cuh",
        "mbarrier_init(n_consumed(s), 4 * (kCfg.bundle + 1));",
        "mbarrier_init(n_consumed(s), 4);",
    ),
    "a short bundle's arrivals missing": (
        "sm90/pingpong_roles.cuh",
        "nth + 1 < count ? 1 : kCfg.bundle - count + 2",
        "nth + 1 < count ? 1 : 2",
    ),
    "ring positions left behind": ("sm90/pingpong_roles.cuh", "n.advance_by(steps);", "n.advance_by(steps > 0);"),
    "only one warpgroup hears of the end": (
        "sm90/pingpong_roles.cuh",
        "for (int w = 0; w < 2; ++w) {  // one",
        "{  // one",
    ),
    "tickets of the back counted from the front": (
        "sm90/bundles.cuh",
        "window.from_back ? cut.tickets(rows, pieces) - 1 - before : before",
        "before",
    ),
    "both ends pass each other": (
        "sm90/pingpong_roles.cuh",
        "return both < total;",
        "return both < static_cast<u64>(total) + 1;",
    ),
    "the counter of tickets left behind": (
        "sm90/pingpong_roles.cuh",
        "if (both + 1 == static_cast<u64>(total) + gridDim.x)",
        "if (both + 2 == static_cast<u64>(total) + gridDim.x)",
    ),
    "arrivals of pieces left behind": (
        "sm90/pingpong_epilogue.cuh",
        "h.p.tickets[kTicketWords + slot] = 0;",
        "h.p.tickets[kTicketWords + slot] = 1;",
    ),
    "slots of the back counted from the front": (
        "sm90/bundles.cuh",
        "window.from_back ? window.total_slots - slots_end : slots_end - pieces",
        "slots_end - pieces",
    ),
    "a group one row longer than the ring stays": (
        "sm90/cut.cuh",
        "rows <= kCfg.n_stages * kTileK",
        "rows <= kCfg.n_stages * kTileK + 1",
    ),
    "narrowed tile stored whole": (
        "sm90/pingpong_epilogue.cuh",
        "h.p.n - col < cols ? h.p.n - col : cols",
        "h.p.n - col",
    ),
    "narrowed tile stored in wide boxes": ("sm90/pingpong_epilogue.cuh", "&h.c[cols < kCfg.n ? 1 : 0]", "&h.c[0]"),
    "narrowed tile loaded in wide boxes": ("sm90/pingpong_roles.cuh", "&h.b[tile.cols < kCfg.n ? 1 : 0]", "&h.b[0]"),
    "staging filled before it has left": (
        "sm90/pingpong_epilogue.cuh",
        "if (issues()) tma_store_wait_read<1>();  // the",
        "//",
    ),
    "staging filled before the box before the last one has left": (
        "sm90/pingpong_epilogue.cuh",
        "tma_store_wait_read<1>();",
        "tma_store_wait_read<2>();",
    ),
    "always the first eight rows stored": ("sm90/pingpong_epilogue.cuh", "box, 0, eight * 8, down", "box, 0, 0, down"),
    "eight rows stored after their sixteen": (
        "sm90/pingpong_epilogue.cuh",
        "down + at % 4 * 16 + eight * 8",
        "down + at % 4 * 16",
    ),
    "box stored before all have written it": (
        "sm90/pingpong_epilogue.cuh",
        "fence_proxy_async();\n            meet();",
        "",
    ),
    "own piece counted twice": (
        "sm90/pingpong_epilogue.cuh",
        "for (int i = 0; i < kAccumulators; ++i) acc[i] = 0.0f;",
        "for (int i = 1; i < kAccumulators; ++i) acc[i] = 0.0f;",
    ),
    "empty groups skipped": ("sm90/grouped_mm_wgrad_pingpong.cuh", "(h.p.flags & kAccumulate) == 0", "false"),
}


def kernel_of(file: str) -> str:
    """The kernel that shows a fault in a file; several include most of them."""
    return "wgrad" if any(word in file for word in ("pingpong", "bundles", "cut.", "ragged", "stores")) else "forward"
