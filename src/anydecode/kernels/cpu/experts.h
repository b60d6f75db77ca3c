/* Mixture of experts: the chosen experts of all rows become slots, grouped by expert. */
#ifndef ANYDECODE_EXPERTS_H
#define ANYDECODE_EXPERTS_H

#include "linear.h"
#include "pointwise.h"

/* The op's scratch memory for a pass of n rows. A slot is one pair (row, chosen expert). */
typedef struct {
  int32_t *expert, *slot;   /* [n * top_k], each row's experts in order of id, -1 after the last,
                             * and their slots */
  int32_t *start;           /* [experts + 1], first slot of each expert */
  float *weight;            /* [n * top_k] */
  float *score, *choice;    /* [logits], of one row */
  float *group;             /* [groups], of one row */
  float *block;             /* [logits], 0 for those that a block may choose from, or -inf */
  float *x, *gate, *up, *y; /* [slots, ...] */
  Activations *quantised;    /* the inputs of gate matrices, then those of down matrices */
  Activations *quantised_up; /* those of up matrices, which may be the same */
} ExpertScratch;

/* The number of a row's logits. */
INLINE int num_logits(const Op *op) { return op->count * op->routing->logits_per_expert; }

static ExpertScratch expert_scratch(const Op *op, int n, float *base) {
  int64_t slots = (int64_t)n * op->groups;
  int is_mlp = op->routing->kind == EXPERT_MLPS, inner = is_mlp ? op->experts[0]->out_features : 0;
  int width = op->experts[0]->in_features;
  int width_out = is_mlp ? op->width_out : op->experts[0]->out_features;
  ExpertScratch scratch;
  scratch.expert = (int32_t *)base;
  scratch.slot = scratch.expert + slots;
  scratch.weight = (float *)(scratch.slot + slots);
  scratch.start = (int32_t *)(scratch.weight + slots);
  scratch.score = (float *)(scratch.start + op->count + 1);
  scratch.choice = scratch.score + num_logits(op);
  scratch.group = scratch.choice + num_logits(op);
  scratch.block = scratch.group + num_logits(op);
  scratch.x = scratch.block + num_logits(op);
  scratch.gate = scratch.x + slots * width;
  scratch.up = scratch.gate + slots * inner;
  scratch.y = scratch.up + slots * inner;
  scratch.quantised = (Activations *)(scratch.y + slots * width_out);
  scratch.quantised_up = scratch.quantised;
  if (op->kv_heads) scratch.quantised_up += slots * (op->width / QUANT_BLOCK);
  return scratch;
}

/* Whether entry `e` is among the `top` largest of `count` values, ties to the lower index. */
INLINE int is_among_largest(const float *values, int count, int e, int top) {
  int rank = 0;
  for (int o = 0; o < count; o++)
    rank += values[o] > values[e] || (values[o] == values[e] && o < e);
  return rank < top;
}

/* Set the choice scores of all groups to -inf, except those with the largest sums of their one or
 * two largest scores. */
static void drop_groups(int count, const Routing *routing, float *choice, float *sums) {
  int groups = routing->num_groups, each = count / groups;
  for (int g = 0; g < groups; g++) {
    float first = -INFINITY, second = -INFINITY;
    for (int e = g * each; e < (g + 1) * each; e++) {
      float low = choice[e] < first ? choice[e] : first;
      first = choice[e] > first ? choice[e] : first;
      second = low > second ? low : second;
    }
    sums[g] = routing->scores_per_group == 1 ? first : first + second;
  }
  for (int g = 0; g < groups; g++)
    if (!is_among_largest(sums, groups, g, routing->groups_per_row))
      for (int e = g * each; e < (g + 1) * each; e++) choice[e] = -INFINITY;
}

/* The root of softplus. */
INLINE f8 f8_root_softplus(f8 x) {
  float v[8];
  f8_store(v, f8_softplus(x));
  for (int i = 0; i < 8; i++) v[i] = sqrtf(v[i]);
  return f8_load(v);
}

/* The scores of one row's experts in float32; softmax scores are divided by the result. */
static float expert_scores(const float *router, int count, const Routing *routing, float *score) {
  int is_sigmoid = routing->is_sigmoid;
  float max = router[0], sum = 0.0f;
  for (int e = 1; e < count; e++) max = router[e] > max ? router[e] : max;
  for (int e = 0; e < count; e += 8) {
    f8 x = f8_load_part(router + e, count - e);
    f8 y = routing->is_root ? f8_root_softplus(x)
           : is_sigmoid     ? f8_sigmoid(x)
                            : f8_exp(f8_sub(x, f8_set(max)));
    f8_store_part(score + e, y, count - e);
  }
  for (int e = 0; e < count; e++) sum += score[e];
  return is_sigmoid ? 1.0f : sum;
}

/* Choose an expert by its logit, and return its softmax among those that are close to it. */
static float next_share(const float *router, int count, float jitter, float *score, float *choice,
                        int32_t *expert) {
  int best = 0;
  for (int e = 1; e < count; e++)
    if (choice[e] > choice[best]) best = e;
  float max = choice[best], sum = 0.0f;
  for (int e = 0; e < count; e += 8)
    f8_store_part(score + e, f8_exp(f8_sub(f8_load_part(router + e, count - e), f8_set(max))),
                  count - e);
  for (int e = 0; e < count; e++) {
    float magnitude = fabsf(router[e]), factor = magnitude > max ? magnitude : max;
    int is_far = (max - router[e]) / factor > 2.0f * jitter;
    if (choice[e] != -INFINITY && !is_far) sum += score[e];
  }
  choice[best] = -INFINITY;
  *expert = best;
  return score[best] / sum;
}

/* Choose the experts of one row as the scoring "sparsemixer" does, in order of id. */
static void mix_sparsely(const Op *op, const float *router, const ExpertScratch *scratch,
                         int32_t *expert, float *weight) {
  memcpy(scratch->choice, router, (size_t)op->count * 4);
  for (int i = 0; i < op->groups; i++) {
    int32_t best;
    float share = next_share(router, op->count, op->routing->jitter, scratch->score,
                             scratch->choice, &best);
    int at = i;
    for (; at > 0 && expert[at - 1] > best; at--) {
      expert[at] = expert[at - 1];
      weight[at] = weight[at - 1];
    }
    expert[at] = best;
    weight[at] = share;
  }
}

/* Choose the experts of one row whose given weight is not 0. */
static void route_given(const Op *op, const float *router, int32_t *expert, float *weight) {
  const Routing *routing = op->routing;
  int chosen = 0;
  float sum = 0.0f;
  for (int e = 0; e < op->count; e++) {
    if (router[e] == 0.0f) continue;
    expert[chosen] = e;
    weight[chosen++] = router[e];
    sum += router[e];
  }
  for (int i = 0; i < chosen && routing->normalise; i++) weight[i] /= sum * routing->scale + 1e-5f;
  for (int i = chosen; i < op->groups; i++) expert[i] = -1;
}

/* The scores that one row's experts are chosen by; its weights are the scores divided by the
 * result. */
static float choice_scores(const Op *op, const float *router, const ExpertScratch *scratch) {
  const Routing *routing = op->routing;
  float *score = scratch->score, sum = expert_scores(router, num_logits(op), routing, score);
  const float *bias = routing->selection_bias;
  /* The order of softmax scores is that of the logits. */
  int has_scores = routing->is_sigmoid || bias || routing->num_groups > 1;
  has_scores = has_scores && !routing->by_logits;
  for (int e = 0; e < num_logits(op); e++)
    scratch->choice[e] = (has_scores ? score[e] / sum : router[e]) + (bias ? bias[e] : 0.0f);
  return sum;
}

/* Whether two rows see the same positions of the same text. */
static int see_the_same(const Pass *pass, int row, int other) {
  return pass->table[row] == pass->table[other] && pass->prefix[row] == pass->prefix[other] &&
         pass->tail_start[row] == pass->tail_start[other] &&
         pass->tail_length[row] == pass->tail_length[other];
}

/* Set `block` to 0 for the experts with the largest choice scores of any of the rows first to
 * last - 1, from which these rows may choose, and to -inf for the others. */
static void choose_for_block(const Op *op, const float *router, int first, int last,
                             const ExpertScratch *scratch) {
  int count = op->count, top = op->routing->block_experts;
  float *choice = scratch->choice, *block = scratch->block;
  for (int r = first; r < last; r++) {
    choice_scores(op, router + (int64_t)r * count, scratch);
    for (int e = 0; e < count; e++)
      if (r == first || choice[e] > block[e]) block[e] = choice[e];
  }
  for (int e = 0; e < count; e++)
    choice[e] = is_among_largest(block, count, e, top) ? 0.0f : -INFINITY;
  memcpy(block, choice, (size_t)count * 4);
}

/* The experts of a token, in order of id. */
static void list_experts(const Op *op, int32_t token, int32_t *expert) {
  const Routing *routing = op->routing;
  int32_t row = token < 0 || token >= routing->num_tokens ? 0 : token;
  const int32_t *experts = routing->token_experts + (int64_t)row * op->groups;
  for (int i = 0; i < op->groups; i++) {
    int at = i;
    for (; at > 0 && expert[at - 1] > experts[i]; at--) expert[at] = expert[at - 1];
    expert[at] = experts[i];
  }
}

/* Make experts of a row's chosen logits, in order of id, with the sums of their weights. */
static void merge_logits(const Op *op, int chosen, int32_t *expert, float *weight) {
  int merged = 0;
  for (int i = 0; i < chosen; i++) {
    int32_t own = expert[i] / op->routing->logits_per_expert;
    if (merged && expert[merged - 1] == own) {
      weight[merged - 1] += weight[i];
      continue;
    }
    expert[merged] = own;
    weight[merged++] = weight[i];
  }
  for (int i = merged; i < chosen; i++) expert[i] = -1;
}

/* Choose the experts of one row, in order of id, and compute their weights. */
static void route(const Op *op, const float *router, int32_t token, const ExpertScratch *scratch,
                  int32_t *expert, float *weight) {
  const Routing *routing = op->routing;
  int count = num_logits(op), top = op->groups, chosen = 0;
  float *score = scratch->score, *choice = scratch->choice, chosen_sum = 0.0f;
  if (routing->jitter >= 0.0f) {
    mix_sparsely(op, router, scratch, expert, weight);
    return;
  }
  if (routing->is_given) {
    route_given(op, router, expert, weight);
    return;
  }
  float sum = choice_scores(op, router, scratch);
  for (int e = 0; e < count && routing->block_experts; e++) choice[e] += scratch->block[e];
  if (routing->num_groups > 1) drop_groups(count, routing, choice, scratch->group);
  if (routing->token_experts) {
    list_experts(op, token, expert);
    for (; chosen < top; chosen++) {
      weight[chosen] = score[expert[chosen]] / sum;
      chosen_sum += weight[chosen];
    }
  }
  for (int e = 0; e < count && chosen < top; e++) {
    if (!is_among_largest(choice, count, e, top)) continue;
    expert[chosen] = e;
    weight[chosen] = score[e] / sum;
    chosen_sum += weight[chosen++];
  }
  for (int i = 0; i < chosen && routing->normalise; i++) weight[i] /= chosen_sum + 1e-20f;
  for (int i = 0; i < chosen && routing->scale != 1.0f; i++) weight[i] *= routing->scale;
  for (int i = 0; i < chosen && routing->factors; i++) weight[i] *= routing->factors[expert[i]];
  if (routing->logits_per_expert > 1) merge_logits(op, chosen, expert, weight);
}

static void assign_slots(const Op *op, int n, ExpertScratch *scratch) {
  int slots = n * op->groups, next = 0;
  for (int e = 0; e < op->count; e++) {
    scratch->start[e] = next;
    for (int i = 0; i < slots; i++)
      if (scratch->expert[i] == e) scratch->slot[i] = next++;
  }
  scratch->start[op->count] = next;
}

/* The number of experts with matrices. */
INLINE int num_matrices(const Op *op) { return op->count - op->routing->num_identity; }

/* Add to the pass's sums what products with the experts of all slots read. */
static void count_reads(const Pass *pass, const Op *op, const ExpertScratch *scratch) {
  int is_mlp = op->routing->kind == EXPERT_MLPS, kinds = is_mlp ? 3 : 1;
  int first = is_mlp && op->routing->is_plain; /* of plain experts, gate and up are one */
  for (int e = 0; e < num_matrices(op); e++) {
    int64_t bytes = 0;
    for (int kind = first; kind < kinds; kind++) {
      const Matrix *w = op->experts[kind * num_matrices(op) + e];
      bytes += column_groups(w) * w->group_bytes;
    }
    pass->expert_reads[2] += bytes;
    if (scratch->start[e] == scratch->start[e + 1]) continue;
    pass->expert_reads[0]++;
    pass->expert_reads[1] += bytes;
  }
}

/* Quantise the inputs of slot `s`, which is of expert `e`, as its matrices store them. */
static void quantise_slot(const Op *op, const ExpertScratch *scratch, int64_t s, int e) {
  int width = op->experts[0]->in_features, blocks = width / QUANT_BLOCK;
  const float *x = scratch->x + s * width;
  if (e >= num_matrices(op)) return;
  quantise_inputs(x, op->experts[e]->order, width, scratch->quantised + s * blocks);
  if (op->kv_heads) {
    const int32_t *order = op->experts[num_matrices(op) + e]->order;
    quantise_inputs(x, order, width, scratch->quantised_up + s * blocks);
  }
}

static void expert_products(const Op *op, const ExpertScratch *scratch, int which, const float *x,
                            float *out, int part, int parts) {
  for (int e = 0; e < num_matrices(op); e++) {
    const Matrix *w = op->experts[which * num_matrices(op) + e];
    int first = scratch->start[e], rows = scratch->start[e + 1] - first;
    int begin, end;
    if (!rows) continue;
    split_groups(w, part, parts, &begin, &end);
    if (begin >= end) continue;
    const void *from = x + (int64_t)first * w->in_features;
    if (!reads_floats(w->format))
      from = (which == 1 ? scratch->quantised_up : scratch->quantised) +
             (int64_t)first * (w->in_features / QUANT_BLOCK);
    const float *bias = op->routing->bias[which];
    if (bias) bias += (int64_t)e * w->out_features;
    linear_columns(w, from, row_units(w), rows, bias, out + (int64_t)first * w->out_features,
                   w->out_features, begin, end);
  }
}

/* Add the LoRA product of the row's adapter to y [out_features], the product of x and matrix
 * `which` of the expert of (row, expert) pair i. */
static void add_lora(const Pass *pass, const Op *op, const ExpertScratch *scratch, int i, int which,
                  const float *x, float *y) {
  if (op->layer < 0 || !pass->adapters || pass->adapters[i / op->groups] < 0) return;
  if (scratch->expert[i] >= num_matrices(op)) return;
  int number = which * num_matrices(op) + scratch->expert[i];
  const Matrix *w = op->experts[number];
  const Lora *loras = pass->loras + (int64_t)pass->adapters[i / op->groups] * pass->num_targets;
  lora_row(loras + op->layer + number, x, w->in_features, w->out_features, y);
}

/* Gather the input of (row, expert) pair i from those of the row, `x`. */
static void gather_input(const Op *op, const float *x, int i, float *to) {
  const Routing *routing = op->routing;
  int width = op->experts[0]->in_features, size = width / routing->num_parts;
  x += (int64_t)(i / op->groups) * op->width;
  if (routing->kind != EXPERT_SUMS) memcpy(to, x, (size_t)width * 4);
  for (int p = 0; routing->kind == EXPERT_SUMS && p < routing->num_parts; p++)
    memcpy(to + p * size, x + (p * op->groups + i % op->groups) * size, (size_t)size * 4);
}

/* Put the products of a row's experts side by side, part by part. */
static void join_products(const Pass *pass, const Op *op, const ExpertScratch *scratch, int row,
                          float *out) {
  const Matrix *first = op->experts[0];
  int size = first->out_features / op->routing->num_parts;
  for (int e = 0; e < op->groups; e++) {
    int64_t i = (int64_t)row * op->groups + e, s = scratch->slot[i];
    float *y = scratch->y + s * first->out_features;
    add_lora(pass, op, scratch, (int)i, 0, scratch->x + s * first->in_features, y);
    for (int p = 0; p < op->routing->num_parts; p++)
      memcpy(out + (p * op->groups + e) * size, y + p * size, (size_t)size * 4);
  }
}

static void mix_row(const Pass *pass, const Op *op, const ExpertScratch *scratch, int row,
                    float *out) {
  const Matrix *first = op->experts[0];
  int inner = first->out_features, is_mlp = op->routing->kind == EXPERT_MLPS;
  memset(out, 0, (size_t)op->width_out * 4);
  for (int i = row * op->groups; i < (row + 1) * op->groups && scratch->expert[i] >= 0; i++) {
    float *y = scratch->y + (int64_t)scratch->slot[i] * op->width_out;
    if (scratch->expert[i] >= num_matrices(op))
      y = scratch->x + (int64_t)scratch->slot[i] * op->width;
    const float *from = is_mlp ? scratch->gate + (int64_t)scratch->slot[i] * inner
                               : scratch->x + (int64_t)scratch->slot[i] * first->in_features;
    add_lora(pass, op, scratch, i, is_mlp ? 2 : 0, from, y);
    if (op->routing->output_factors) {
      multiply_row(y, op->routing->output_factors, op->width_out, y);
      rms_norm(y, op->width_out, 1, NULL, 0, op->routing->output_eps, y);
    }
    f8 weight = f8_set(op->routing->scales_inputs ? 1.0f : scratch->weight[i]);
    for (int d = 0; d < op->width_out; d += 8) {
      int left = op->width_out - d;
      f8 sum = f8_fma(weight, f8_load_part(y + d, left), f8_load_part(out + d, left));
      f8_store_part(out + d, sum, left);
    }
  }
}

/* Run one part of one phase. Fields of op: groups = experts per row, count = number of experts,
 * heads = whether any gate or up matrix is quantised, head_dim = whether any down matrix is, kv_heads =
 * whether any gate and up matrix of an expert store their inputs in different orders, layer = index of
 * its first matrix among the adapters' targets, or -1, x and y as for the activation. Phases run in
 * sequence; the first has one part. */
static void experts(const Pass *pass, const Op *op, int n, const float *x, const float *router,
                    float *base, float *out, int phase, int part, int parts) {
  ExpertScratch scratch = expert_scratch(op, n, base);
  ExpertKind kind = op->routing->kind;
  int slots = n * op->groups, inner = op->experts[0]->out_features;
  int first = (int)((int64_t)slots * part / parts);
  int last = (int)((int64_t)slots * (part + 1) / parts);
  switch (phase) {
    case 0:
      for (int r = 0, stop = 0; r < n; r++) {
        if (op->routing->block_experts && r == stop) {
          while (++stop < n && see_the_same(pass, r, stop)) {}
          choose_for_block(op, router, r, stop, &scratch);
        }
        route(op, router + (int64_t)r * num_logits(op), pass->tokens[r], &scratch,
              scratch.expert + r * op->groups, scratch.weight + r * op->groups);
      }
      assign_slots(op, n, &scratch);
      count_reads(pass, op, &scratch);
      break;
    case 1:
      for (int i = first; i < last; i++) {
        if (scratch.expert[i] < 0) continue;
        int64_t s = scratch.slot[i];
        gather_input(op, x, i, scratch.x + s * op->experts[0]->in_features);
        if (op->heads) quantise_slot(op, &scratch, s, scratch.expert[i]);
      }
      break;
    case 2:
      expert_products(op, &scratch, 0, scratch.x, kind == EXPERT_MLPS ? scratch.gate : scratch.y,
                      part, parts);
      if (kind == EXPERT_MLPS && !op->routing->is_plain)
        expert_products(op, &scratch, 1, scratch.x, scratch.up, part, parts);
      break;
    case 3:
      for (int i = first; i < last && kind == EXPERT_MLPS; i++) {
        if (scratch.expert[i] < 0 || scratch.expert[i] >= num_matrices(op)) continue;
        int64_t s = scratch.slot[i];
        const float *from = scratch.x + s * op->width;
        float *hidden = scratch.gate + s * inner, *up = scratch.up + s * inner;
        add_lora(pass, op, &scratch, i, 0, from, hidden);
        if (!op->routing->is_plain) add_lora(pass, op, &scratch, i, 1, from, up);
        if (op->routing->scales_inputs) { /* of linear functions: the same as of their input */
          scale_row(hidden, inner, scratch.weight[i], hidden);
          scale_row(up, inner, scratch.weight[i], up);
        }
        if (op->routing->is_plain) activate(hidden, inner, op->activation, hidden);
        else gated(hidden, up, inner, op, hidden);
        if (op->head_dim) {
          const int32_t *order = op->experts[2 * num_matrices(op) + scratch.expert[i]]->order;
          quantise_inputs(hidden, order, inner, scratch.quantised + s * (inner / QUANT_BLOCK));
        }
      }
      break;
    case 4:
      if (kind == EXPERT_MLPS)
        expert_products(op, &scratch, 2, scratch.gate, scratch.y, part, parts);
      break;
    default:
      for (int r = n * part / parts; r < n * (part + 1) / parts; r++) {
        float *to = out + (int64_t)r * op->width_out;
        if (kind == EXPERT_PRODUCTS) join_products(pass, op, &scratch, r, to);
        else mix_row(pass, op, &scratch, r, to);
      }
  }
}

#endif
