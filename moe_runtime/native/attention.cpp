// Causal attention over a paged KV cache with float32 sums, keys and values read where they lie. See
// moe_runtime/attention/cpu_native.py.
//
// A task is a tile of one sequence's new tokens with the query heads that share a KV head. It goes through the keys a block at a time
// and keeps each row's running maximum, sum and weighted values (online softmax: Milakov and Gimelshein, 2018). Blocks begin at
// multiples of KEYS in the sequence, so a row's bits do not depend on the rows beside it, but on whether there are FEW_ROWS of them.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include <omp.h>

#include "activation.h"
#include "lanes.h"
#include "products.h"

// One call: one layer. Rows of q, k and v lie stride apart, heads follow one another. Sizes in elements.
struct AttentionCall {
    const bf16 *q, *k, *v;         // num_tokens rows of heads (q) or kv_heads
    const bf16 *cos, *sin;         // [num_tokens, half]
    const int64_t *slots;          // num_tokens: where each token's key and value go
    bf16 *keys, *values;           // The cache: [num_blocks, block_size, kv_heads, head_dim]
    const int32_t *tables;         // [num_seqs, table_width] blocks
    const int32_t *query_starts;   // num_seqs + 1
    const int32_t *seq_lens;       // num_seqs, new tokens included
    bf16 *rotated;                 // [num_tokens, heads, head_dim], written
    bf16 *out;                     // The same
    int64_t q_stride, k_stride, v_stride, num_tokens, num_seqs, table_width, num_blocks, block_size;
    int64_t heads, kv_heads, head_dim, half;
    int64_t window;                // Tokens that a token sees, itself included; 0: all.
    float scale;
    int32_t interleaved, num_threads;
};

namespace {

constexpr int64_t KEYS = 64;        // Keys of a block.
constexpr int64_t TILE = 128;       // Rows of a task, about.
constexpr int64_t FEW_ROWS = 8;     // So many rows multiply with keys as they lie; for more, keys are transposed.
constexpr int64_t VECTORS = 4;      // Vectors of keys multiplied at once.

struct Task {
    int64_t seq, group, first, count;  // Tokens first..first+count-1 of the sequence's new ones.
};

// What a thread works with. acc holds the even values of each STEP of a head, then the odd ones.
struct Scratch {
    std::vector<uint32_t> packed;
    std::vector<float> acc, top, sum;
    alignas(64) float scores[ROWS * KEYS];
    float factors[ROWS];
    const bf16 *key[KEYS], *value[KEYS];            // Of the block's tokens.
    const bf16 *next_key[KEYS], *next_value[KEYS];  // Of the next block's; fetched meanwhile. After the last block: the same again.
};

void fetch(const bf16 *const *rows, int64_t count) {
    for (int64_t c = 0; c < KEYS; c++)
        for (int64_t i = 0; i < count; i += 64 / sizeof(bf16)) __builtin_prefetch(rows[c] + i);
}

// Pairs (i, half + i), or neighbours, turned; each product and sum is rounded, as torch does it step by step.
void rotate(const AttentionCall &call, const bf16 *x, int64_t token, bf16 *out) {
    const bf16 *cos = call.cos + token * call.half, *sin = call.sin + token * call.half;
    int64_t step = call.interleaved ? 2 : 1, apart = call.interleaved ? 1 : call.half;
    for (int64_t i = 0; i < call.half; i++) {
        float a = widen(x[i * step]), b = widen(x[i * step + apart]), c = widen(cos[i]), s = widen(sin[i]);
        out[i * step] = narrow(widen(narrow(a * c)) - widen(narrow(b * s)));
        out[i * step + apart] = narrow(widen(narrow(b * c)) + widen(narrow(a * s)));
    }
    std::copy(x + 2 * call.half, x + call.head_dim, out + 2 * call.half);
}

void rotate_and_write(const AttentionCall &call, int64_t token) {
    int64_t d = call.head_dim, width = call.kv_heads * d;
    for (int64_t h = 0; h < call.heads; h++)
        rotate(call, call.q + token * call.q_stride + h * d, token, call.rotated + (token * call.heads + h) * d);
    for (int64_t g = 0; g < call.kv_heads; g++)
        rotate(call, call.k + token * call.k_stride + g * d, token, call.keys + call.slots[token] * width + g * d);
    const bf16 *v = call.v + token * call.v_stride;
    std::copy(v, v + width, call.values + call.slots[token] * width);
}

// scores[r][c] = q[r] . key[c] for 4 keys at a time as they lie.
template <int R>
void scores_of_rows(const AttentionCall &call, Scratch &s, const bf16 *const *q, int64_t count) {
    for (int64_t c = 0; c < count; c += COLUMNS) {
        const bf16 *keys[COLUMNS];
        for (int i = 0; i < COLUMNS; i++) keys[i] = s.key[std::min(c + i, count - 1)];
        Sum sums[R][COLUMNS] = {};
        int64_t k = 0;
        for (; k < call.head_dim; k += STEP) {
            int64_t left = call.head_dim - k;
            Packed values[COLUMNS];
            for (int i = 0; i < COLUMNS; i++) values[i] = left < STEP ? load_first(keys[i] + k, left) : load(keys[i] + k);
            for (int r = 0; r < R; r++) {
                Packed row = left < STEP ? load_first(q[r] + k, left) : load(q[r] + k);
                for (int i = 0; i < COLUMNS; i++) sums[r][i] = add_products(sums[r][i], values[i], row);
            }
        }
        for (int r = 0; r < R; r++) reduce4(sums[r], s.scores + r * KEYS + c);
    }
}

// The same by transposed keys: packed[j][c] holds values 2j and 2j + 1 of key c.
template <int R>
void scores_of_packed(const AttentionCall &call, Scratch &s, const bf16 *const *q) {
    for (int64_t c = 0; c < KEYS; c += VECTORS * LANES) {
        Sum sums[R][VECTORS] = {};
        for (int64_t j = 0; j < call.head_dim / 2; j++) {
            Packed values[VECTORS];
            for (int i = 0; i < VECTORS; i++)
                values[i] = load((const bf16 *)(s.packed.data() + j * KEYS + c + i * LANES));
            for (int r = 0; r < R; r++) {
                Packed pair = repeat_pair(q[r] + 2 * j);
                for (int i = 0; i < VECTORS; i++) sums[r][i] = add_products(sums[r][i], values[i], pair);
            }
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < VECTORS; i++) store(s.scores + r * KEYS + c + i * LANES, sums[r][i]);
    }
}

void pack(const AttentionCall &call, Scratch &s, int64_t count) {
    int64_t pairs = call.head_dim / 2;
    s.packed.resize(pairs * KEYS);
    for (int64_t c = 0; c < KEYS; c++)
        for (int64_t j = 0; j < pairs; j++) {
            uint32_t pair = 0;
            if (c < count) memcpy(&pair, s.key[c] + 2 * j, sizeof pair);
            s.packed[j * KEYS + c] = pair;
        }
}

// Scores of a row become weights; those of keys before `low` and from `high` on become 0. Updates the row's maximum and sum and
// returns what is to be multiplied with what it has gathered so far.
float weigh(float *scores, float scale, int64_t low, int64_t high, float &top, float &sum) {
    for (int64_t c = 0; c < KEYS; c++) scores[c] = c < low || c >= high ? -INFINITY : scores[c] * scale;
    float best = std::max(top, largest(scores, KEYS));
    if (best == -INFINITY) {
        std::fill(scores, scores + KEYS, 0.0f);
        return 1.0f;
    }
    for (int64_t c = 0; c < KEYS; c++) scores[c] = scores[c] == -INFINITY ? 0.0f : exp_of(scores[c] - best);
    float factor = top == -INFINITY ? 0.0f : exp_of(top - best);
    sum = sum * factor + total(scores, KEYS);
    top = best;
    return factor;
}

// acc[r] = acc[r] * factors[r] + the sum over keys of scores[r][c] * value[c], for R rows of acc, `width` apart.
template <int R>
void gather_values(const AttentionCall &call, const Scratch &s, int64_t count, float *acc, int64_t width) {
    for (int64_t k = 0; k < call.head_dim; k += STEP) {
        int64_t left = call.head_dim - k;
        Sum even[R], odd[R];
        for (int r = 0; r < R; r++) {
            even[r] = load_sum(acc + r * width + k) * s.factors[r];
            odd[r] = load_sum(acc + r * width + k + LANES) * s.factors[r];
        }
        for (int64_t c = 0; c < count; c++) {
            Packed values = left < STEP ? load_first(s.value[c] + k, left) : load(s.value[c] + k);
            Sum evens = even_values(values), odds = odd_values(values);
            for (int r = 0; r < R; r++) {
                even[r] += evens * s.scores[r * KEYS + c];
                odd[r] += odds * s.scores[r * KEYS + c];
            }
        }
        for (int r = 0; r < R; r++) {
            store(acc + r * width + k, even[r]);
            store(acc + r * width + k + LANES, odd[r]);
        }
    }
}

// A block of `count` keys from position `block` on, with R rows of the task.
template <int R>
void attend_rows(const AttentionCall &call, Scratch &s, bool packed, int64_t row, int64_t position, int64_t block,
                 int64_t count, const bf16 *const *q, int64_t width) {
    int64_t per_group = call.heads / call.kv_heads;
    if (!row) fetch(s.next_key, call.head_dim);
    if (packed) scores_of_packed<R>(call, s, q + row);
    else scores_of_rows<R>(call, s, q + row, count);
    for (int r = 0; r < R; r++) {
        int64_t own = position + (row + r) / per_group - block;  // Of this row's token, in the block.
        int64_t low = call.window ? own - call.window + 1 : 0, high = std::min(count, own + 1);
        s.factors[r] = weigh(s.scores + r * KEYS, call.scale, low, high, s.top[row + r], s.sum[row + r]);
    }
    if (!row) fetch(s.next_value, call.head_dim);
    gather_values<R>(call, s, count, s.acc.data() + row * width, width);
}

template <int R = ROWS, typename... Args>
void attend_some(int64_t rows, Args &&...args) {
    if constexpr (R > 1)
        if (rows < R) return attend_some<R - 1>(rows, args...);
    attend_rows<R>(args...);
}

// Where keys and values of a sequence's tokens first..first+count-1 lie; the rest of the KEYS are as the last.
void find(const AttentionCall &call, const int32_t *table, int64_t group, int64_t first, int64_t count, const bf16 **key,
          const bf16 **value) {
    int64_t stride = call.kv_heads * call.head_dim;
    for (int64_t c = 0; c < count;) {
        int64_t inner = (first + c) % call.block_size, run = std::min(call.block_size - inner, count - c);
        int64_t slot = table[(first + c) / call.block_size] * call.block_size + inner;
        for (int64_t offset = slot * stride + group * call.head_dim; run; run--, c++, offset += stride)
            key[c] = call.keys + offset, value[c] = call.values + offset;
    }
    for (int64_t c = count; c < KEYS; c++) key[c] = key[count - 1], value[c] = value[count - 1];
}

void attend(const AttentionCall &call, const Task &task, Scratch &s) {
    int64_t per_group = call.heads / call.kv_heads, rows = task.count * per_group, d = call.head_dim;
    int64_t width = (d + STEP - 1) / STEP * STEP, start = call.query_starts[task.seq];
    int64_t fresh = call.query_starts[task.seq + 1] - start;
    int64_t position = call.seq_lens[task.seq] - fresh + task.first, end = position + task.count;
    const int32_t *table = call.tables + task.seq * call.table_width;
    std::vector<const bf16 *> q(rows);
    int64_t head = (start + task.first) * call.heads + task.group * per_group;
    for (int64_t r = 0; r < rows; r++) q[r] = call.rotated + (head + r / per_group * call.heads + r % per_group) * d;
    s.acc.assign(rows * width, 0.0f), s.top.assign(rows, -INFINITY), s.sum.assign(rows, 0.0f);
    int64_t first = call.window ? std::max<int64_t>(0, position - call.window + 1) / KEYS * KEYS : 0;
    find(call, table, task.group, first, std::min(KEYS, end - first), s.next_key, s.next_value);
    fetch(s.next_key, d), fetch(s.next_value, d);
    for (int64_t block = first; block < end; block += KEYS) {
        int64_t count = std::min(KEYS, end - block), left = end - block - count;
        std::copy(s.next_key, s.next_key + KEYS, s.key), std::copy(s.next_value, s.next_value + KEYS, s.value);
        if (left) find(call, table, task.group, block + KEYS, std::min(KEYS, left), s.next_key, s.next_value);
        bool packed = rows > FEW_ROWS;
        if (packed) pack(call, s, count);
        for (int64_t row = 0; row < rows; row += ROWS) {
            int64_t taken = std::min<int64_t>(ROWS, rows - row), last = position + (row + taken - 1) / per_group;
            if (last < block) continue;  // All keys come after these rows' tokens.
            attend_some(taken, call, s, packed, row, position, block, std::min(count, last + 1 - block), q.data(), width);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        bf16 *out = call.out + (q[r] - call.rotated);
        for (int64_t i = 0; i < d; i++) {
            int64_t at = i / STEP * STEP + i % 2 * LANES + i % STEP / 2;
            out[i] = narrow(s.acc[r * width + at] / s.sum[r]);
        }
    }
}

std::vector<Task> tasks_of(const AttentionCall &call) {
    std::vector<Task> tasks;
    int64_t tokens = std::max<int64_t>(1, TILE * call.kv_heads / call.heads);
    for (int64_t seq = 0; seq < call.num_seqs; seq++) {
        int64_t fresh = call.query_starts[seq + 1] - call.query_starts[seq];
        // The last tokens have most keys: they come first, so that threads end together.
        for (int64_t first = (fresh - 1) / tokens * tokens; fresh && first >= 0; first -= tokens)
            for (int64_t group = 0; group < call.kv_heads; group++)
                tasks.push_back({seq, group, first, std::min(tokens, fresh - first)});
    }
    return tasks;
}

bool inside(const AttentionCall &call) {
    for (int64_t i = 0; i < call.num_tokens; i++)
        if (call.slots[i] < 0 || call.slots[i] >= call.num_blocks * call.block_size) return false;
    for (int64_t seq = 0; seq < call.num_seqs; seq++) {
        int64_t blocks = (call.seq_lens[seq] + call.block_size - 1) / call.block_size;
        if (blocks > call.table_width) return false;
        for (int64_t i = 0; i < blocks; i++) {
            int32_t block = call.tables[seq * call.table_width + i];
            if (block < 0 || block >= call.num_blocks) return false;
        }
    }
    return true;
}

}  // namespace

// Returns 0, or -1 if a slot or block is not in the cache.
extern "C" int64_t moe_runtime_attention(const AttentionCall *given) {
    const AttentionCall &call = *given;
    if (!inside(call)) return -1;
    std::vector<Task> tasks = tasks_of(call);
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(call.num_threads)
    {
#pragma omp for
        for (int64_t token = 0; token < call.num_tokens; token++) rotate_and_write(call, token);
        static thread_local Scratch scratch;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < int64_t(tasks.size());)
            attend(call, tasks[i], scratch);
    }
    return 0;
}
