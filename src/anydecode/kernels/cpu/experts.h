/* Mixture of experts: every row's choices become slots, grouped by expert. */
#ifndef ANYDECODE_EXPERTS_H
#define ANYDECODE_EXPERTS_H

#include "linear.h"
#include "pointwise.h"

/* The op's room for a pass of n rows; a slot is one (row, chosen expert). */
typedef struct {
  int32_t *expert, *slot;   /* [n * top_k], rows' choices in order of expert id */
  int32_t *start;           /* [experts + 1], first slot of each expert */
  int32_t *row;             /* [slots] */
  float *weight;            /* [n * top_k] */
  float *x, *gate, *up, *y; /* [slots, ...] */
  Activations *quantised;
} ExpertRoom;

static ExpertRoom expert_room(const Op *op, int n, float *base) {
  int64_t slots = (int64_t)n * op->groups;
  int inner = op->experts[0]->out_features;
  ExpertRoom room;
  room.expert = (int32_t *)base;
  room.slot = room.expert + slots;
  room.row = room.slot + slots;
  room.weight = (float *)(room.row + slots);
  room.start = (int32_t *)(room.weight + slots);
  room.x = (float *)(room.start + op->count + 1);
  room.gate = room.x + slots * op->width;
  room.up = room.gate + slots * inner;
  room.y = room.up + slots * inner;
  room.quantised = (Activations *)(room.y + slots * op->width_out);
  return room;
}

/* Softmax in float32, the `top` largest with ties to the lower id, in order of expert id. */
static void route(const float *router, int count, int top, int normalise, int32_t *expert,
                  float *weight) {
  float most = router[0], sum = 0.0f, kept = 0.0f;
  for (int e = 1; e < count; e++) most = router[e] > most ? router[e] : most;
  float probability[8];
  for (int e = 0; e < count; e += 8) {
    f8 p = f8_exp(f8_sub(f8_load_part(router + e, count - e), f8_set(most)));
    f8_store(probability, p);
    for (int j = 0; j < 8 && e + j < count; j++) sum += probability[j];
  }
  int chosen = 0;
  for (int e = 0; e < count && chosen < top; e++) {
    int ahead = 0;
    for (int o = 0; o < count; o++)
      ahead += router[o] > router[e] || (router[o] == router[e] && o < e);
    if (ahead >= top) continue;
    f8_store(probability, f8_exp(f8_set(router[e] - most)));
    expert[chosen] = e;
    weight[chosen] = probability[0] / sum;
    kept += weight[chosen++];
  }
  for (int i = 0; i < chosen && normalise; i++) weight[i] /= kept;
}

static void assign_slots(const Op *op, int n, ExpertRoom *room) {
  int slots = n * op->groups, next = 0;
  for (int e = 0; e < op->count; e++) {
    room->start[e] = next;
    for (int i = 0; i < slots; i++)
      if (room->expert[i] == e) {
        room->row[next] = i / op->groups;
        room->slot[i] = next++;
      }
  }
  room->start[op->count] = next;
}

static void expert_products(const Op *op, const ExpertRoom *room, int which, const float *x,
                            float *out, int part, int parts) {
  for (int e = 0; e < op->count; e++) {
    const Matrix *w = op->experts[which * op->count + e];
    int first = room->start[e], rows = room->start[e + 1] - first;
    int begin, end;
    if (!rows) continue;
    split_groups(w, part, parts, &begin, &end);
    if (begin >= end) continue;
    const void *from = x + (int64_t)first * w->in_features;
    if (!is_float(w->format))
      from = room->quantised + (int64_t)first * (w->in_features / QUANT_BLOCK);
    linear_columns(w, from, rows, NULL, out + (int64_t)first * w->out_features, w->out_features,
                   begin, end);
  }
}

/* Add to y [out_features], the product of x and matrix `which` of choice i's expert, what the
 * adapter of the choice's row adds there. */
static void adapt(const Pass *pass, const Op *op, const ExpertRoom *room, int i, int which,
                  const float *x, float *y) {
  if (op->layer < 0 || !pass->adapters || pass->adapters[i / op->groups] < 0) return;
  int number = which * op->count + room->expert[i];
  const Matrix *w = op->experts[number];
  const Lora *loras = pass->loras + (int64_t)pass->adapters[i / op->groups] * pass->num_targets;
  lora_row(loras + op->layer + number, x, w->in_features, w->out_features, y);
}

static void mix_row(const Pass *pass, const Op *op, const ExpertRoom *room, int row, float *out) {
  int inner = op->experts[0]->out_features;
  memset(out, 0, (size_t)op->width_out * 4);
  for (int i = row * op->groups; i < (row + 1) * op->groups; i++) {
    float *y = room->y + (int64_t)room->slot[i] * op->width_out;
    adapt(pass, op, room, i, 2, room->gate + (int64_t)room->slot[i] * inner, y);
    f8 weight = f8_set(room->weight[i]);
    for (int d = 0; d < op->width_out; d += 8) {
      int left = op->width_out - d;
      f8 sum = f8_fma(weight, f8_load_part(y + d, left), f8_load_part(out + d, left));
      f8_store_part(out + d, sum, left);
    }
  }
}

/* op: groups = experts per row, count = experts, kv_heads = whether to normalise, heads = whether any
 * gate or up is in blocks, head_dim = whether any down is, layer = number of the first of its
 * matrices among the adapters' targets, or -1. Phases follow one another; the
 * first has one part. */
static void experts(const Pass *pass, const Op *op, int n, const float *x, const float *router,
                    float *base, float *out, int phase, int part, int parts) {
  ExpertRoom room = expert_room(op, n, base);
  int slots = n * op->groups, inner = op->experts[0]->out_features;
  int first = (int)((int64_t)slots * part / parts);
  int last = (int)((int64_t)slots * (part + 1) / parts);
  switch (phase) {
    case 0:
      for (int r = 0; r < n; r++)
        route(router + (int64_t)r * op->count, op->count, op->groups, op->kv_heads,
              room.expert + r * op->groups, room.weight + r * op->groups);
      assign_slots(op, n, &room);
      break;
    case 1:
      for (int s = first; s < last; s++) {
        const float *from = x + (int64_t)room.row[s] * op->width;
        memcpy(room.x + (int64_t)s * op->width, from, (size_t)op->width * 4);
        if (op->heads)
          quantise_row(from, op->width, room.quantised + (int64_t)s * (op->width / QUANT_BLOCK));
      }
      break;
    case 2:
      expert_products(op, &room, 0, room.x, room.gate, part, parts);
      expert_products(op, &room, 1, room.x, room.up, part, parts);
      break;
    case 3:
      for (int i = first; i < last; i++) {
        int64_t s = room.slot[i];
        const float *from = room.x + s * op->width;
        float *hidden = room.gate + s * inner, *up = room.up + s * inner;
        adapt(pass, op, &room, i, 0, from, hidden);
        adapt(pass, op, &room, i, 1, from, up);
        gated(hidden, up, inner, op->activation, hidden);
        if (op->head_dim)
          quantise_row(hidden, inner, room.quantised + s * (inner / QUANT_BLOCK));
      }
      break;
    case 4: expert_products(op, &room, 2, room.gate, room.y, part, parts); break;
    default:
      for (int r = n * part / parts; r < n * (part + 1) / parts; r++)
        mix_row(pass, op, &room, r, out + (int64_t)r * op->width_out);
  }
}

#endif
