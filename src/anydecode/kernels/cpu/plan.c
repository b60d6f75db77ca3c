/* Divides a pass into stages and parts. Each calling thread reuses its arrays for the next pass. */
#include "plan.h"

#include <stdlib.h>

enum { EXPERT_PHASES = 6 };

typedef struct {
  void *data;
  size_t size;
} Buffer;

static int grow(Buffer *buffer, size_t size) {
  if (size <= buffer->size) return 1;
  void *data = realloc(buffer->data, 2 * size);
  if (!data) return 0;
  buffer->data = data;
  buffer->size = 2 * size;
  return 1;
}

/* How many of the first positions have the same slots in the tables of two rows; INT32_MAX if both
 * have the same table. */
static int32_t shared_positions(const Pass *pass, int row, int other) {
  int32_t table = pass->table[row], second = pass->table[other], count = 0;
  if (table == second) return INT32_MAX;
  if (pass->table_stride[table] || pass->table_stride[second]) return 0;
  int32_t end = pass->prefix[row] < pass->prefix[other] ? pass->prefix[row] : pass->prefix[other];
  const int32_t *slots = pass->tables[table], *others = pass->tables[second];
  while (count < end && slots[count] == others[count]) count++;
  return count;
}

/* Whether a row that shares so many positions with a tile's first row joins the tile: if they are at
 * least half of its positions. The tile reads them once for all its rows, and its thread attends to
 * the other positions of each row one row after the other. */
static int joins_tile(const Pass *pass, int row, int32_t shared) {
  return shared >= KEY_BLOCK && shared >= pass->prefix[row] / 2;
}

static void plan_tiles(Plan *plan) {
  const Pass *pass = plan->pass;
  int tiles = 0, start = 0;
  for (int r = 0; r < pass->num_rows; r++) {
    if (r - start == ATTENTION_ROWS) start = r;
    plan->shared[r] = shared_positions(pass, r, start);
    if (!joins_tile(pass, r, plan->shared[r])) {
      start = r;
      plan->shared[r] = INT32_MAX;
    }
    if (r == start) plan->tile_start[tiles++] = r;
    plan->tile_of[r] = tiles - 1;
  }
  plan->tile_start[tiles] = pass->num_rows;
  plan->num_tiles = tiles;
  plan->tile_rows = 0;
  for (int i = 0; i < tiles; i++) {
    int rows = plan->tile_start[i + 1] - plan->tile_start[i];
    if (rows > plan->tile_rows) plan->tile_rows = rows;
  }
}

/* Tiles of the plan of attention to selected positions: rows that attend to all positions stay in
 * their tiles, unless one of these has another row. */
static void plan_selected_tiles(const Plan *plan, const Selection *selection, Plan *to) {
  int tiles = 0;
  to->tile_rows = 1;
  for (int tile = 0; tile < plan->num_tiles; tile++) {
    int first = plan->tile_start[tile], last = plan->tile_start[tile + 1], is_whole = 1;
    for (int r = first; r < last; r++) is_whole &= selection->number[r] < 0;
    if (is_whole && last - first > to->tile_rows) to->tile_rows = last - first;
    for (int r = first; r < last; r++) {
      if (r == first || !is_whole) to->tile_start[tiles++] = r;
      to->tile_of[r] = tiles - 1;
      to->shared[r] = is_whole ? plan->shared[r] : INT32_MAX;
    }
  }
  to->tile_start[tiles] = plan->pass->num_rows;
  to->num_tiles = tiles;
}

/* The length of the table that row r has of its own for a selection: it has the entries that the row
 * attends to, and then the positions of its window, or the selected positions, and then those behind
 * the last whole block with a key. 0: none. */
static int32_t own_length(const Pass *pass, const Op *op, int r) {
  int32_t begin = row_begin(pass, op, r), is_scored = is_scored_row(pass, op, r);
  int32_t count = is_scored ? op->top_k : num_candidates(pass, op, r);
  if (!op->entry) return is_scored ? count + num_behind(pass, op, r) : 0;
  return count + seen_positions(pass, r) - (begin > 0 ? begin : 0);
}

/* Plan the attention of the layers whose selection is of the kind of an OP_SELECT, if a row has a
 * table of its own. Returns 0 where memory is short. */
static int plan_selection(Plan *plan, const Op *op) {
  static _Thread_local Buffer buffers[MAX_SELECTIONS][4];
  static _Thread_local Selection selections[MAX_SELECTIONS];
  static _Thread_local Pass passes[MAX_SELECTIONS];
  const Pass *pass = plan->pass;
  int kind = op->selection - 1, groups = op->groups, num_own = 0, num_scored = 0;
  Buffer *rows = buffers[kind], *tables = rows + 1, *slots = rows + 2, *orders = rows + 3;
  Selection *selection = &selections[kind];
  Pass *selected = &passes[kind];
  size_t count = (size_t)pass->num_rows, num_tables = (size_t)pass->num_tables;
  int64_t longest = 0, stride = 0;
  for (int r = 0; r < pass->num_rows; r++) {
    int32_t length = own_length(pass, op, r), candidates = num_candidates(pass, op, r);
    num_own += length > 0;
    stride = length > stride ? length : stride;
    if (!is_scored_row(pass, op, r)) continue;
    num_scored++;
    longest = candidates > longest ? candidates : longest;
  }
  if (!num_own) return 1;
  int is_by_row = plan->threads == 1 || num_scored >= 2 * plan->threads;
  size_t num_orders = is_by_row ? (size_t)plan->threads : (size_t)num_scored * (size_t)groups;
  size_t num_slots = (size_t)num_own * (size_t)groups * (size_t)stride;
  if (!grow(rows, (9 * count + 1) * 4) || !grow(tables, (count + num_tables) * 16) ||
      !grow(slots, num_slots * 4) || !grow(orders, num_orders * (size_t)longest * 4))
    return 0;
  int32_t *ints = rows->data;
  const int32_t **slot_tables = tables->data;
  int64_t *strides = (int64_t *)(slot_tables + count + num_tables);
  *selection = (Selection){.rows = ints, .number = ints + count, .scored = ints + 2 * count,
                           .slots = slots->data, .orders = orders->data, .longest = longest,
                           .stride = stride, .num_rows = num_scored, .top_k = op->top_k,
                           .groups = groups, .is_by_row = is_by_row};
  int32_t *table = ints + 3 * count, *prefix = table + count, *tail_length = prefix + count;
  *selected = *pass;
  selected->tables = slot_tables;
  selected->table_stride = strides;
  selected->table = table;
  selected->prefix = prefix;
  selected->tail_length = tail_length;
  for (size_t i = 0; i < num_tables; i++) {
    slot_tables[i] = pass->tables[i];
    strides[i] = pass->table_stride[i];
  }
  for (int r = 0, number = 0, scored = 0; r < pass->num_rows; r++) {
    int32_t length = own_length(pass, op, r);
    int is_scored = is_scored_row(pass, op, r);
    selection->number[r] = length ? number : -1;
    selection->scored[r] = is_scored ? scored : -1;
    if (is_scored) selection->rows[scored++] = r;
    table[r] = length ? (int32_t)num_tables + number : pass->table[r];
    prefix[r] = length ? length : pass->prefix[r];
    tail_length[r] = length ? 0 : pass->tail_length[r];
    if (!length) continue;
    slot_tables[num_tables + (size_t)number] = selection->slots + number * groups * stride;
    strides[num_tables + (size_t)number++] = 0;
  }
  selection->plan = *plan;
  selection->plan.pass = selected;
  selection->plan.groups = groups;
  selection->plan.first_selected = (int32_t)num_tables;
  selection->plan.tile_start = ints + 6 * count;
  selection->plan.tile_of = ints + 7 * count + 1;
  selection->plan.shared = ints + 8 * count + 1;
  plan_selected_tiles(plan, selection, &selection->plan);
  plan->selections[kind] = selection;
  return 1;
}

/* Plan the attention of all selections. Returns 0 where memory is short. */
static int plan_selections(Plan *plan) {
  int is_planned[MAX_SELECTIONS] = {0};
  for (int i = plan->pass->first; i < plan->pass->last; i++) {
    const Op *op = plan->pass->ops + i;
    if (op->code != OP_SELECT || is_planned[op->selection - 1]++) continue;
    if (!plan_selection(plan, op)) return 0;
  }
  return 1;
}

static int64_t state_floats(const Plan *plan, const Op *op) {
  plan = attention_plan(plan, op);
  if (!is_split(plan, op)) return 0;
  int padded = (op->head_dim + 7) / 8 * 8;
  return attention_parts(plan, op) * attention_state_floats(padded, state_heads(plan, op));
}

static void close_stage(Plan *plan) {
  if (!plan->num_stages) return;
  Stage *stage = plan->stages + plan->num_stages - 1;
  int parts = 0, rows = 0;
  for (int i = stage->first; i < stage->last; i++) {
    const Op *op = plan->pass->ops + i;
    if (is_row_op(op->code)) rows = stage->rows;
    if (op->code == OP_LINEAR) parts += linear_parts(op->matrix, stage->rows, plan->threads);
    if (op->code == OP_GROUPED_LINEAR) parts += grouped_parts(op, stage->rows, plan->threads);
    if (op->code == OP_ATTEND) parts += attention_parts(plan, op);
    if (op->code == OP_INDEX) parts += index_parts(plan, op);
    if (op->code == OP_SCAN) parts += op->recurrence->heads;
    if (op->code == OP_EXPERTS) parts += stage->phase ? 8 * plan->threads : 1;
  }
  stage->row_parts = rows < 4 * plan->threads ? rows : 4 * plan->threads;
  plan->parts[plan->num_stages - 1] = stage->row_parts + parts;
}

static void open_stage(Plan *plan, int op, int rows, int64_t base, int phase) {
  close_stage(plan);
  plan->stages[plan->num_stages++] = (Stage){op, op, rows, 0, phase, base};
}

static void plan_ops(Plan *plan, int first, int last, int rows, int64_t base) {
  int starts_stage = 1;
  for (int i = first; i < last; i++) {
    const Op *op = plan->pass->ops + i;
    int experts = op->code == OP_EXPERTS;
    for (int phase = 0; phase < (experts ? EXPERT_PHASES : 1); phase++) {
      if (experts || starts_stage || op->barrier) open_stage(plan, i, rows, base, phase);
      plan->stages[plan->num_stages - 1].last = i + 1;
    }
    starts_stage = experts;
  }
}

int make_plan(const Pass *pass, int threads, Plan *plan) {
  static _Thread_local Buffer stages, parts, tile_start, tile_of, shared, states, best_tokens;
  size_t ops = (size_t)(pass->num_prologue + pass->last - pass->first + pass->num_ops - pass->head);
  size_t max_stages = EXPERT_PHASES * ops + 3, rows = (size_t)pass->num_rows;
  int64_t floats = 0;
  if (!grow(&stages, max_stages * sizeof(Stage)) || !grow(&parts, max_stages * 4) ||
      !grow(&tile_start, (rows + 1) * 4) || !grow(&tile_of, rows * 4) ||
      !grow(&shared, rows * 4))
    return 0;
  *plan = (Plan){.pass = pass, .stages = stages.data, .parts = parts.data, .threads = threads,
                 .groups = 1,
                 .tile_start = tile_start.data, .tile_of = tile_of.data, .shared = shared.data};
  if (pass->first < pass->last) plan_tiles(plan);
  if (!plan_selections(plan)) return 0;
  for (int i = pass->first; i < pass->last; i++) {
    const Op *op = pass->ops + i;
    int64_t needed = op->code == OP_ATTEND ? state_floats(plan, op) : 0;
    floats = needed > floats ? needed : floats;
  }
  if (!grow(&states, (size_t)floats * 4)) return 0;
  plan->states = states.data;
  for (int i = 0; i < MAX_SELECTIONS; i++)
    if (plan->selections[i]) plan->selections[i]->plan.states = states.data;
  /* Layers alone read what follows the first op, the embedding. */
  plan_ops(plan, 0, pass->first < pass->last ? pass->num_prologue : 1, pass->num_rows, 0);
  plan_ops(plan, pass->first, pass->last, pass->num_rows, 0);
  if (pass->num_logits) {
    int64_t base = pass->head_offset * pass->num_rows;
    plan_ops(plan, pass->head, pass->num_ops, pass->num_logits, base);
  }
  close_stage(plan);
  if (!pass->num_logits || !pass->num_samples) return 1;
  int num_parts = sample_parts(sampled_tokens(pass), threads);
  if (!grow(&best_tokens, (size_t)(num_parts * pass->num_samples) * sizeof(BestToken))) return 0;
  plan->best_tokens = best_tokens.data;
  plan->stages[plan->num_stages] = (Stage){0};
  plan->parts[plan->num_stages++] = num_parts;
  return 1;
}
