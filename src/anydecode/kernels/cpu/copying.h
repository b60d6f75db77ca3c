/* Drafts that are copied from texts. They follow the rule of decoders/speculative/match_cursor.py: a
 * match is followed as long as it is right; else the last occurrence of the longest of the last 4, 2
 * or 1 tokens is taken. */
#ifndef ANYDECODE_COPYING_H
#define ANYDECODE_COPYING_H

#include "layout.h"

enum { LONG_MATCH = 4, MAX_EXTENDED = 20, SEARCH_BLOCK = 64 };
/* A search reads so many of the last tokens of a text, which takes some 10 microseconds. */
enum { MAX_SEARCHED = 1 << 15 };

/* A draft of one step, and the probability of each token to be right if those before it are. With a
 * sibling, another token may stand in the place of the first one. */
typedef struct {
  int32_t tokens[MAX_DRAFTS];
  float probabilities[MAX_DRAFTS]; /* as a drafter gives them */
  double chances[MAX_DRAFTS];
  int count, source;
  int32_t sibling; /* -1: none was found */
  float sibling_probability;
  double sibling_chance; /* 0: it is not to be scored */
  int num_siblings;      /* that are scored: 0 or 1 */
} Draft;

static int has_token(const int32_t *tokens, int count, int32_t token) {
  int found = 0;
  for (int i = 0; i < count; i++) found |= tokens[i] == token;
  return found;
}

/* How many tokens before `end` in `tokens` equal the last of `text`, up to `max`. */
static int match_length(const int32_t *tokens, int64_t end, const int32_t *text, int64_t length,
                        int max) {
  int n = 0;
  while (n < max && n < end && n < length && tokens[end - 1 - n] == text[length - 1 - n]) n++;
  return n;
}

/* Search `text` for the end of `of`, where a token follows. */
static void find_match(CopyText *text, const CopyText *of) {
  int32_t last = of->tokens[of->length - 1];
  int best = 0;
  int64_t position = 0, first = text->length > MAX_SEARCHED ? text->length - MAX_SEARCHED : 0;
  for (int64_t stop = text->length - 1; stop > first && best < LONG_MATCH; stop -= SEARCH_BLOCK) {
    int64_t start = stop - first > SEARCH_BLOCK ? stop - SEARCH_BLOCK : first;
    if (!has_token(text->tokens + start, (int)(stop - start), last)) continue;
    for (int64_t end = stop; end > start && best < LONG_MATCH; end--) {
      if (text->tokens[end - 1] != last) continue;
      int n = match_length(text->tokens, end, of->tokens, of->length, LONG_MATCH);
      n = n < LONG_MATCH && n > 2 ? 2 : n; /* as an index of 4, 2 and 1 tokens finds */
      if (n > best) {
        best = n;
        position = end;
      }
    }
  }
  if (best > 1)
    best = match_length(text->tokens, position, of->tokens, of->length, MAX_EXTENDED);
  if (best > text->match) {
    text->match = best;
    text->position = position;
  }
}

/* Search all texts for the end of the first one, except where a long match is followed. */
static void find_matches(const SequenceDrafts *sequence) {
  for (int i = 0; i < sequence->num_texts; i++)
    if (sequence->texts[i].match < LONG_MATCH) find_match(sequence->texts + i, sequence->texts);
}

/* Append a generated token to the first text, and move the matches of all texts on. */
static void read_token(const SequenceDrafts *sequence, int32_t token) {
  CopyText *own = sequence->texts;
  for (int i = 0; i < sequence->num_texts; i++) {
    CopyText *text = sequence->texts + i;
    int is_known = text->match && text->position < text->length;
    int32_t predicted = is_known ? text->tokens[text->position] : -1;
    if (predicted >= 0)
      text->outcomes[text->num_outcomes++] = 2 * text->match + (predicted == token);
    if (predicted == token) {
      text->position++;
      text->match++;
    } else {
      text->match = 0;
    }
  }
  if (own) own->tokens[own->length++] = token;
  find_matches(sequence);
}

INLINE double chance_of(const CopyText *text, int depth) {
  int length = text->match + depth;
  return text->match ? text->chances[length < MAX_MATCH ? length : MAX_MATCH] : 0.0;
}

/* Copy a draft of up to `max` tokens, from the text with the most probable next token. */
static void copy_draft(const SequenceDrafts *sequence, int max, Draft *draft) {
  const CopyText *text = sequence->texts;
  draft->source = draft->count = draft->num_siblings = 0;
  draft->sibling = -1;
  draft->sibling_chance = 0.0;
  if (!text) return;
  for (int i = 1; i < sequence->num_texts; i++)
    if (chance_of(sequence->texts + i, 0) > chance_of(text, 0)) text = sequence->texts + i;
  int64_t period = text->length - text->position;
  draft->source = (int)(text - sequence->texts);
  if (!text->match || period < 1) return;
  for (int n = 0; n < max; n++) {
    int32_t token = text->tokens[text->position + n % period];
    if (token < 0) return;
    draft->tokens[n] = token;
    draft->probabilities[n] = 0.0f;
    draft->chances[n] = chance_of(text, n);
    draft->count = n + 1;
  }
}

#endif
