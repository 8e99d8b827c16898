// Rows gathered past the caches into memory that another process reads. See moe_runtime/dispatch/peer_store.py.

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <omp.h>

// out[i] = rows[index[i]]. Rows are row_bytes long, one after another on both sides.
struct StreamCall {
    const char *rows;
    const int64_t *index;    // num_stored
    char *out;
    int64_t num_rows, num_stored, row_bytes;
    int32_t num_threads;
};

namespace {

constexpr int64_t LINE = 64;
constexpr int64_t BYTES_PER_THREAD = 131072;  // With fewer, another thread takes longer to come than to do it.

// Whole cache lines past the caches, the rest not.
void stream(char *out, const char *from, int64_t count) {
#ifdef __SSE2__
    int64_t head = std::min<int64_t>(count, -(intptr_t)out & (LINE - 1));
    memcpy(out, from, head);
    for (out += head, from += head, count -= head; count >= LINE; out += LINE, from += LINE, count -= LINE)
        for (int64_t i = 0; i < LINE; i += sizeof(__m128i))
            _mm_stream_si128((__m128i *)(out + i), _mm_loadu_si128((const __m128i *)(from + i)));
#endif
    memcpy(out, from, count);
}

}  // namespace

// Returns -1, without a row stored, if index leads outside the rows. Everything is visible to other processes before it returns.
extern "C" int64_t moe_runtime_stream_rows(const StreamCall *given) {
    const StreamCall &call = *given;
    for (int64_t i = 0; i < call.num_stored; i++)
        if (call.index[i] < 0 || call.index[i] >= call.num_rows) return -1;
    int64_t useful = 1 + call.num_stored * call.row_bytes / BYTES_PER_THREAD;
#pragma omp parallel num_threads(std::min<int64_t>(call.num_threads, useful))
    {
#pragma omp for
        for (int64_t i = 0; i < call.num_stored; i++) {
            const char *from = call.rows + call.index[i] * call.row_bytes;
            stream(call.out + i * call.row_bytes, from, call.row_bytes);
        }
#ifdef __SSE2__
        _mm_sfence();  // Streaming stores are not in order with the flag that follows.
#endif
    }
    return 0;
}
