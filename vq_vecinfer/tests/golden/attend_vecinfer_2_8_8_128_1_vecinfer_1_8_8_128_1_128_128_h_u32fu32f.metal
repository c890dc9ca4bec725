#define VQ_SHARED(T, name, n) alignas(16) threadgroup T name[n]
#define VQ_GLOBAL(T) const device T*
#define VQ_LOCAL(T, name, n) T name[n]
#define VQ_LOCAL_PTR(T) thread T*
#define VQ_UNROLL _Pragma("clang loop unroll(full)")
#define VQ_FN inline
VQ_FN void k_numbers(VQ_GLOBAL(uint) codes, VQ_GLOBAL(float) codebook, int t, int c, VQ_LOCAL_PTR(float) u) {
const int TOKENS = 2; const int SUB = 8; const int BITS = 8; const int DIM = 128; const int BOOKS = 1;
for (int i = 0; i < TOKENS; ++i) {
VQ_UNROLL
for (int m = 0; m < 8; m += SUB) {
const int place = (c + m) / SUB, bit = ((t + i) * (DIM / SUB) + place) * BITS, at = bit >> 5, shift = bit & 31;
uint code = codes[at] >> uint(shift);
if (shift + BITS > 32) code |= codes[at + 1] << uint(32 - shift);
code = (code & ((1u << uint(BITS)) - 1u)) + (BOOKS == 1 ? 0u : uint(place) << uint(BITS));
VQ_UNROLL
for (int j = 0; j < SUB; ++j) u[i * 8 + m + j] = codebook[code * uint(SUB) + uint(j)];
}
}
}
VQ_FN void v_numbers(VQ_GLOBAL(uint) codes, VQ_GLOBAL(float) codebook, int t, int c, VQ_LOCAL_PTR(float) u) {
const int TOKENS = 1; const int SUB = 8; const int BITS = 8; const int DIM = 128; const int BOOKS = 1;
for (int i = 0; i < TOKENS; ++i) {
VQ_UNROLL
for (int m = 0; m < 8; m += SUB) {
const int place = (c + m) / SUB, bit = ((t + i) * (DIM / SUB) + place) * BITS, at = bit >> 5, shift = bit & 31;
uint code = codes[at] >> uint(shift);
if (shift + BITS > 32) code |= codes[at + 1] << uint(32 - shift);
code = (code & ((1u << uint(BITS)) - 1u)) + (BOOKS == 1 ? 0u : uint(place) << uint(BITS));
VQ_UNROLL
for (int j = 0; j < SUB; ++j) u[i * 8 + m + j] = codebook[code * uint(SUB) + uint(j)];
}
}
}
template <typename Q, int M>
[[kernel]] void custom_kernel_attend_vecinfer_2_8_8_128_1_vecinfer_1_8_8_128_1_128_128_h_u32fu32f__float16_t_1_float16_t_float_int32_t_float_float16_t_float16_t_float16_t_float16_t_int32_t_int32_t_uint32_t_float_uint32_t_float_uint32_t_float_float(
  const device float16_t* q [[buffer(0)]],
  const constant int* q_shape [[buffer(1)]],
  const device float* prepared [[buffer(2)]],
  const device int32_t* rows [[buffer(3)]],
  const device float* mask [[buffer(4)]],
  const constant int* mask_shape [[buffer(5)]],
  const device float16_t* exact_k [[buffer(6)]],
  const constant int* exact_k_shape [[buffer(7)]],
  const device float16_t* exact_v [[buffer(8)]],
  const device float16_t* sink_k [[buffer(9)]],
  const constant int* sink_k_shape [[buffer(10)]],
  const device float16_t* sink_v [[buffer(11)]],
  const device int32_t* k_table [[buffer(12)]],
  const constant int* k_table_shape [[buffer(13)]],
  const device int32_t* v_table [[buffer(14)]],
  const constant int* v_table_shape [[buffer(15)]],
  const device uint32_t* k_codes [[buffer(16)]],
  const device float* k_codebook [[buffer(17)]],
  const device uint32_t* v_codes [[buffer(18)]],
  const device float* v_codebook [[buffer(19)]],
  const device uint32_t* run_numbers [[buffer(20)]],
  device float* sums [[buffer(21)]],
  device float* tops [[buffer(22)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint scale_bits = run_numbers[0]; const uint length = run_numbers[1]; const uint causal = run_numbers[2]; const uint masked = run_numbers[3]; const uint regular = run_numbers[4]; const uint splits = run_numbers[5]; const uint exact_splits = run_numbers[6]; VQ_SHARED(float, queries, 128 * M);
VQ_SHARED(float, weights, 256 * M);
VQ_SHARED(float, partial, 512 * M);
VQ_SHARED(float, marks, 8 * M);
const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup, thread = thread_index_in_threadgroup;
const uint chunk = threadgroup_position_in_grid.x, split = threadgroup_position_in_grid.y;
const uint B = q_shape[0], heads = q_shape[1], L = q_shape[2], H = exact_k_shape[1], total = heads / H * L;
const uint b = threadgroup_position_in_grid.z / H, head = threadgroup_position_in_grid.z - b * H, m0 = chunk * uint(M);
const int packed = rows[b * 8u], first = rows[b * 8u + 1u], recent = rows[b * 8u + 2u], pad = rows[b * 8u + 3u];
const int hidden = rows[b * 8u + 4u];
const float scaled = as_type<float>(scale_bits), lowest = -3.0e38f;
const uint own_rows = (b * heads + head * (heads / H)) * L;
VQ_LOCAL(float, top, M);
VQ_LOCAL(float, sum, M);
VQ_LOCAL(int, last, M);
VQ_UNROLL
for (int m = 0; m < M; ++m) {
last[m] = int(length) - (causal != 0u ? int(L) - int(min(m0 + uint(m), total - 1u) % L) : 0);
top[m] = lowest;
sum[m] = 0.0f;
}
if (split < exact_splits) {
for (uint i = thread; i < 128u * uint(M); i += 128u) {
const uint c = i / uint(M), row = min(m0 + (i - c * uint(M)), total - 1u);
queries[i] = float(q[(own_rows + row) * 128u + c]) * scaled;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const int RUN = 8;
VQ_LOCAL(float, sums_of, 8 * M);
VQ_LOCAL(float, flats, M);
VQ_UNROLL
for (int i = 0; i < 8 * M; ++i) sums_of[i] = 0.0f;
VQ_UNROLL
for (int m = 0; m < M; ++m) flats[m] = 0.0f;
const uint run_lane = lane & 15u, run_token = lane / 16u, run_lanes = 16u;
const int weighing = int(sg) * 32 * M;
const bool has_run = run_lane < 16u;
const int run_channel = has_run ? int(run_lane) * 8 : 0;
const uint near = (uint(recent) + 31u) / 32u;
const uint units = near + (uint(first) + 31u) / 32u, width = exact_k_shape[2];
for (uint n = split * 4u + sg; n < units; n += exact_splits * 4u) {
const bool old = n >= near;
const uint unit = old ? n - near : n, tokens = old ? uint(first) : uint(recent);
const uint count = min(32u, tokens - unit * 32u);
const uint place = unit * 32u + (old ? 0u : width - uint(recent));
const uint above = (b * H + head) * (old ? uint(sink_k_shape[2]) : width) + place;
const int column = old ? pad - hidden + int(place) : int(length) - int(width) + int(place);
VQ_GLOBAL(half) from_k = (old ? sink_k : exact_k) + above * 128u;
VQ_GLOBAL(half) from_v = (old ? sink_v : exact_v) + above * 128u;
VQ_LOCAL(float, f, 1 * M);
VQ_UNROLL
for (int i = 0; i < 1 * M; ++i) f[i] = 0.0f;
const int along = int(lane & 31u) * 1, across = int(lane / 32u);
for (int c0 = across * 8; c0 < 128; c0 += 64) {
VQ_UNROLL
for (int more = 0; more < 8; ++more) {
const int c = c0 + more * 8, t = along;
{
VQ_LOCAL(float, u, 8);
VQ_UNROLL
for (int j = 0; j < 8; ++j) u[j] = float(from_k[min(t, int(count) - 1) * 128 + c + j]);;
VQ_UNROLL
for (int j = 0; j < 8; ++j) {
VQ_UNROLL
for (int m = 0; m < M; ++m) {
const float one = queries[(c + j) * M + m];
VQ_UNROLL
for (int i = 0; i < 1; ++i) f[i * M + m] += u[i * 8 + j] * one;
}
}
}
}
}
int own = along;
const int left = int(count) - own;
VQ_UNROLL
for (int m = 0; m < M; ++m) {
float best = lowest;
VQ_UNROLL
for (int i = 0; i < 1; ++i) {
const int place = column + own + i;
bool seen = place >= pad && place <= last[m];
float score = f[i * M + m];
if (masked != 0u && seen && i < left) {
const uint row = min(m0 + uint(m), total - 1u), query = head * (heads / H) + row / L;
const uint mb = uint(mask_shape[0]) == 1u ? 0u : b, mh = uint(mask_shape[1]) == 1u ? 0u : query;
const uint ml = uint(mask_shape[2]) == 1u ? 0u : row % L;
const uint line = (mb * uint(mask_shape[1]) + mh) * uint(mask_shape[2]) + ml;
const float added = mask[line * uint(mask_shape[3]) + uint(place)];
score += added * 1.4426950408889634f;
seen = added > lowest;
}
score = seen ? score : lowest;
f[i * M + m] = score;
best = i < left ? max(best, score) : best;
}
const float next = max(top[m], simd_max(best)), shrink = exp2(top[m] - next);
top[m] = next;
float added = 0.0f;
VQ_UNROLL
for (int i = 0; i < 1; ++i) {
const float weight = i < left ? exp2(f[i * M + m] - next) : 0.0f;
added += weight;
weights[weighing + (own + i) * M + m] = weight;
}
sum[m] = sum[m] * shrink + added;
flats[m] *= shrink;
VQ_UNROLL
for (int i = 0; i < RUN; ++i) sums_of[m * RUN + i] *= shrink;
}
simdgroup_barrier(mem_flags::mem_threadgroup);
if (count == 32u) {
for (int t0 = int(run_token) * 1; t0 < 32; t0 += 16) {
VQ_UNROLL
for (int more = 0; more < 8; ++more) {
const int t = t0 + more * 2, c = run_channel;
VQ_LOCAL(float, u, 8);
VQ_UNROLL
for (int j = 0; j < 8; ++j) u[j] = float(from_v[t * 128 + c + j]);;
VQ_UNROLL
for (int i = 0; i < 1; ++i) {
VQ_UNROLL
for (int m = 0; m < M; ++m) {
const float weight = weights[weighing + (t + i) * M + m];
VQ_UNROLL
for (int j = 0; j < 8; ++j) sums_of[m * RUN + j] += weight * u[i * 8 + j];
}
}
}
}
} else {
for (int t = int(run_token) * 1; t < int(count); t += 2) {
const int c = run_channel;
VQ_LOCAL(float, u, 8);
VQ_UNROLL
for (int j = 0; j < 8; ++j) u[j] = float(from_v[t * 128 + c + j]);;
VQ_UNROLL
for (int i = 0; i < 1; ++i) {
VQ_UNROLL
for (int m = 0; m < M; ++m) {
const float weight = weights[weighing + (t + i) * M + m];
VQ_UNROLL
for (int j = 0; j < 8; ++j) sums_of[m * RUN + j] += weight * u[i * 8 + j];
}
}
}
}
simdgroup_barrier(mem_flags::mem_threadgroup);
}
VQ_UNROLL
for (int m = 0; m < M; ++m) {
for (uint o = run_lanes; o < 32u; o <<= 1) {
flats[m] += simd_shuffle_xor(flats[m], ushort(o));
VQ_UNROLL
for (int j = 0; j < RUN; ++j) sums_of[m * RUN + j] += simd_shuffle_xor(sums_of[m * RUN + j], ushort(o));
}
float all = sum[m];
VQ_UNROLL
for (uint o = 1u; o < 32u; o <<= 1) all += simd_shuffle_xor(all, ushort(o));
if (lane == 0u) {
const float highest = top[m];
marks[(sg * uint(M) + uint(m)) * 2u] = highest;
marks[(sg * uint(M) + uint(m)) * 2u + 1u] = all;
}
if (run_token == 0u && has_run) {
VQ_UNROLL
for (int j = 0; j < RUN; ++j) {
const float one = sums_of[m * RUN + j] + flats[m];
if (run_channel + j < 128) partial[(int(sg) * M + m) * 128 + run_channel + j] = one;
}
}
}
threadgroup_barrier(mem_flags::mem_threadgroup);
} else {
for (uint i = thread; i < 128u * uint(M); i += 128u) {
const uint c = i / uint(M), row = min(m0 + (i - c * uint(M)), total - 1u);
queries[i] = float(prepared[(own_rows + row) * 128u + c]) * scaled;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const int RUN = 8;
VQ_LOCAL(float, sums_of, 8 * M);
VQ_LOCAL(float, flats, M);
VQ_UNROLL
for (int i = 0; i < 8 * M; ++i) sums_of[i] = 0.0f;
VQ_UNROLL
for (int m = 0; m < M; ++m) flats[m] = 0.0f;
const uint run_lane = lane & 15u, run_token = lane / 16u, run_lanes = 16u;
const int weighing = int(sg) * 64 * M;
const bool has_run = run_lane < 16u;
const int run_channel = has_run ? int(run_lane) * 8 : 0;
const uint units = (uint(packed) + 63u) / 64u, begin = (split - exact_splits) * 4u + sg;
for (uint n = begin; n < units; n += (splits - exact_splits) * 4u) {
const uint at = n * 64u, count = min(64u, uint(packed) - at);
const int column = pad - hidden + first + int(at);
const uint k_depth = at / 128u;
const uint k_page = regular != 0u ? k_depth * B + b : uint(k_table[b * uint(k_table_shape[1]) + k_depth]);
const uint k_at_codes = (k_page * H + head) * 512u;
const int k_first = int(at - k_depth * 128u);
VQ_LOCAL(float, f, 2 * M);
VQ_UNROLL
for (int i = 0; i < 2 * M; ++i) f[i] = 0.0f;
const int along = int(lane & 31u) * 2, across = int(lane / 32u);
for (int c0 = across * 8; c0 < 128; c0 += 64) {
VQ_UNROLL
for (int more = 0; more < 8; ++more) {
const int c = c0 + more * 8, t = k_first + along;
{
VQ_LOCAL(float, u, 16);
k_numbers(k_codes + k_at_codes, k_codebook, t, c, u);
VQ_UNROLL
for (int j = 0; j < 8; ++j) {
VQ_UNROLL
for (int m = 0; m < M; ++m) {
const float one = queries[(c + j) * M + m];
VQ_UNROLL
for (int i = 0; i < 2; ++i) f[i * M + m] += u[i * 8 + j] * one;
}
}
}
}
}
int own = along;
const int left = int(count) - own;
VQ_UNROLL
for (int m = 0; m < M; ++m) {
float best = lowest;
VQ_UNROLL
for (int i = 0; i < 2; ++i) {
const int place = column + own + i;
bool seen = place >= pad && place <= last[m];
float score = f[i * M + m];
if (masked != 0u && seen && i < left) {
const uint row = min(m0 + uint(m), total - 1u), query = head * (heads / H) + row / L;
const uint mb = uint(mask_shape[0]) == 1u ? 0u : b, mh = uint(mask_shape[1]) == 1u ? 0u : query;
const uint ml = uint(mask_shape[2]) == 1u ? 0u : row % L;
const uint line = (mb * uint(mask_shape[1]) + mh) * uint(mask_shape[2]) + ml;
const float added = mask[line * uint(mask_shape[3]) + uint(place)];
score += added * 1.4426950408889634f;
seen = added > lowest;
}
score = seen ? score : lowest;
f[i * M + m] = score;
best = i < left ? max(best, score) : best;
}
const float next = max(top[m], simd_max(best)), shrink = exp2(top[m] - next);
top[m] = next;
float added = 0.0f;
VQ_UNROLL
for (int i = 0; i < 2; ++i) {
const float weight = i < left ? exp2(f[i * M + m] - next) : 0.0f;
added += weight;
weights[weighing + (own + i) * M + m] = weight;
}
sum[m] = sum[m] * shrink + added;
flats[m] *= shrink;
VQ_UNROLL
for (int i = 0; i < RUN; ++i) sums_of[m * RUN + i] *= shrink;
}
simdgroup_barrier(mem_flags::mem_threadgroup);
const uint v_depth = at / 128u;
const uint v_page = regular != 0u ? v_depth * B + b : uint(v_table[b * uint(v_table_shape[1]) + v_depth]);
const uint v_at_codes = (v_page * H + head) * 512u;
const int v_first = int(at - v_depth * 128u);
if (count == 64u) {
for (int t0 = int(run_token) * 1; t0 < 64; t0 += 16) {
VQ_UNROLL
for (int more = 0; more < 8; ++more) {
const int t = t0 + more * 2, c = run_channel;
VQ_LOCAL(float, u, 8);
v_numbers(v_codes + v_at_codes, v_codebook, v_first + t, c, u);
VQ_UNROLL
for (int i = 0; i < 1; ++i) {
VQ_UNROLL
for (int m = 0; m < M; ++m) {
const float weight = weights[weighing + (t + i) * M + m];
VQ_UNROLL
for (int j = 0; j < 8; ++j) sums_of[m * RUN + j] += weight * u[i * 8 + j];
}
}
}
}
} else {
for (int t = int(run_token) * 1; t < int(count); t += 2) {
const int c = run_channel;
VQ_LOCAL(float, u, 8);
v_numbers(v_codes + v_at_codes, v_codebook, v_first + t, c, u);
VQ_UNROLL
for (int i = 0; i < 1; ++i) {
VQ_UNROLL
for (int m = 0; m < M; ++m) {
const float weight = weights[weighing + (t + i) * M + m];
VQ_UNROLL
for (int j = 0; j < 8; ++j) sums_of[m * RUN + j] += weight * u[i * 8 + j];
}
}
}
}
simdgroup_barrier(mem_flags::mem_threadgroup);
}
VQ_UNROLL
for (int m = 0; m < M; ++m) {
for (uint o = run_lanes; o < 32u; o <<= 1) {
flats[m] += simd_shuffle_xor(flats[m], ushort(o));
VQ_UNROLL
for (int j = 0; j < RUN; ++j) sums_of[m * RUN + j] += simd_shuffle_xor(sums_of[m * RUN + j], ushort(o));
}
float all = sum[m];
VQ_UNROLL
for (uint o = 1u; o < 32u; o <<= 1) all += simd_shuffle_xor(all, ushort(o));
if (lane == 0u) {
const float highest = top[m];
marks[(sg * uint(M) + uint(m)) * 2u] = highest;
marks[(sg * uint(M) + uint(m)) * 2u + 1u] = all;
}
if (run_token == 0u && has_run) {
VQ_UNROLL
for (int j = 0; j < RUN; ++j) {
const float one = sums_of[m * RUN + j] + flats[m];
if (run_channel + j < 128) partial[(int(sg) * M + m) * 128 + run_channel + j] = one;
}
}
}
threadgroup_barrier(mem_flags::mem_threadgroup);
}
const uint mine = split < exact_splits ? 128u : 128u;
for (uint i = thread; i < 128u * uint(M); i += 128u) {
const uint m = i / 128u, c = i - m * 128u;
float highest = lowest, found = 0.0f, all = 0.0f;
VQ_UNROLL
for (uint g = 0u; g < 4u; ++g) highest = max(highest, float(marks[(g * uint(M) + m) * 2u]));
VQ_UNROLL
for (uint g = 0u; g < 4u; ++g) {
const float shrink = exp2(marks[(g * uint(M) + m) * 2u] - highest);
all += shrink * marks[(g * uint(M) + m) * 2u + 1u];
if (c < mine) found += shrink * partial[(g * uint(M) + m) * mine + c];
}
if (m0 + m < total) {
const uint out = ((b * H + head) * splits + split) * total + m0 + m;
sums[out * 128u + c] = found;
if (c < 2u) tops[out * 2u + c] = c == 0u ? (all == 0.0f ? 0.0f : highest) : all;
}
}

}

template [[host_name("custom_kernel_attend_vecinfer_2_8_8_128_1_vecinfer_1_8_8_128_1_128_128_h_u32fu32f__float16_t_1_float16_t_float_int32_t_float_float16_t_float16_t_float16_t_float16_t_int32_t_int32_t_uint32_t_float_uint32_t_float_uint32_t_float_float")]] [[kernel]] decltype(custom_kernel_attend_vecinfer_2_8_8_128_1_vecinfer_1_8_8_128_1_128_128_h_u32fu32f__float16_t_1_float16_t_float_int32_t_float_float16_t_float16_t_float16_t_float16_t_int32_t_int32_t_uint32_t_float_uint32_t_float_uint32_t_float_float<float16_t, 1>) custom_kernel_attend_vecinfer_2_8_8_128_1_vecinfer_1_8_8_128_1_128_128_h_u32fu32f__float16_t_1_float16_t_float_int32_t_float_float16_t_float16_t_float16_t_float16_t_int32_t_int32_t_uint32_t_float_uint32_t_float_uint32_t_float_float<float16_t, 1>;

// another variant
template <typename Q, int M>
[[kernel]] void custom_kernel_attend_vecinfer_2_8_8_128_1_vecinfer_1_8_8_128_1_128_128_h_u32fu32f__float16_t_2_float16_t_float_int32_t_float_float16_t_float16_t_float16_t_float16_t_int32_t_int32_t_uint32_t_float_uint32_t_float_uint32_t_float_float(
  const device float16_t* q [[buffer(0)]],
  const constant int* q_shape [[buffer(1)]],
  const device float* prepared [[buffer(2)]],
  const device int32_t* rows [[buffer(3)]],
  const device float* mask [[buffer(4)]],
  const constant int* mask_shape [[buffer(5)]],
  const device float16_t* exact_k [[buffer(6)]],
  const constant int* exact_k_shape [[buffer(7)]],
  const device float16_t* exact_v [[buffer(8)]],
  const device float16_t* sink_k [[buffer(9)]],
  const constant int* sink_k_shape [[buffer(10)]],
  const device float16_t* sink_v [[buffer(11)]],
  const device int32_t* k_table [[buffer(12)]],
  const constant int* k_table_shape [[buffer(13)]],
  const device int32_t* v_table [[buffer(14)]],
  const constant int* v_table_shape [[buffer(15)]],
  const device uint32_t* k_codes [[buffer(16)]],
  const device float* k_codebook [[buffer(17)]],
  const device uint32_t* v_codes [[buffer(18)]],
  const device float* v_codebook [[buffer(19)]],
  const device uint32_t* run_numbers [[buffer(20)]],
  device float* sums [[buffer(21)]],
  device float* tops [[buffer(22)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename Q, int M>
[[kernel]] void custom_kernel_attend_vecinfer_2_8_8_128_1_vecinfer_1_8_8_128_1_128_128_h_u32fu32f__float16_t_3_float16_t_float_int32_t_float_float16_t_float16_t_float16_t_float16_t_int32_t_int32_t_uint32_t_float_uint32_t_float_uint32_t_float_float(
  const device float16_t* q [[buffer(0)]],
  const constant int* q_shape [[buffer(1)]],
  const device float* prepared [[buffer(2)]],
  const device int32_t* rows [[buffer(3)]],
  const device float* mask [[buffer(4)]],
  const constant int* mask_shape [[buffer(5)]],
  const device float16_t* exact_k [[buffer(6)]],
  const constant int* exact_k_shape [[buffer(7)]],
  const device float16_t* exact_v [[buffer(8)]],
  const device float16_t* sink_k [[buffer(9)]],
  const constant int* sink_k_shape [[buffer(10)]],
  const device float16_t* sink_v [[buffer(11)]],
  const device int32_t* k_table [[buffer(12)]],
  const constant int* k_table_shape [[buffer(13)]],
  const device int32_t* v_table [[buffer(14)]],
  const constant int* v_table_shape [[buffer(15)]],
  const device uint32_t* k_codes [[buffer(16)]],
  const device float* k_codebook [[buffer(17)]],
  const device uint32_t* v_codes [[buffer(18)]],
  const device float* v_codebook [[buffer(19)]],
  const device uint32_t* run_numbers [[buffer(20)]],
  device float* sums [[buffer(21)]],
  device float* tops [[buffer(22)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename Q, int M>
[[kernel]] void custom_kernel_attend_vecinfer_2_8_8_128_1_vecinfer_1_8_8_128_1_128_128_h_u32fu32f__float16_t_4_float16_t_float_int32_t_float_float16_t_float16_t_float16_t_float16_t_int32_t_int32_t_uint32_t_float_uint32_t_float_uint32_t_float_float(
  const device float16_t* q [[buffer(0)]],
  const constant int* q_shape [[buffer(1)]],
  const device float* prepared [[buffer(2)]],
  const device int32_t* rows [[buffer(3)]],
  const device float* mask [[buffer(4)]],
  const constant int* mask_shape [[buffer(5)]],
  const device float16_t* exact_k [[buffer(6)]],
  const constant int* exact_k_shape [[buffer(7)]],
  const device float16_t* exact_v [[buffer(8)]],
  const device float16_t* sink_k [[buffer(9)]],
  const constant int* sink_k_shape [[buffer(10)]],
  const device float16_t* sink_v [[buffer(11)]],
  const device int32_t* k_table [[buffer(12)]],
  const constant int* k_table_shape [[buffer(13)]],
  const device int32_t* v_table [[buffer(14)]],
  const constant int* v_table_shape [[buffer(15)]],
  const device uint32_t* k_codes [[buffer(16)]],
  const device float* k_codebook [[buffer(17)]],
  const device uint32_t* v_codes [[buffer(18)]],
  const device float* v_codebook [[buffer(19)]],
  const device uint32_t* run_numbers [[buffer(20)]],
  device float* sums [[buffer(21)]],
  device float* tops [[buffer(22)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename Q, int M>
[[kernel]] void custom_kernel_attend_vecinfer_2_8_8_128_1_vecinfer_1_8_8_128_1_128_128_h_u32fu32f__float_4_float_float_int32_t_float_float16_t_float16_t_float16_t_float16_t_int32_t_int32_t_uint32_t_float_uint32_t_float_uint32_t_float_float(
  const device float* q [[buffer(0)]],
  const constant int* q_shape [[buffer(1)]],
  const device float* prepared [[buffer(2)]],
  const device int32_t* rows [[buffer(3)]],
  const device float* mask [[buffer(4)]],
  const constant int* mask_shape [[buffer(5)]],
  const device float16_t* exact_k [[buffer(6)]],
  const constant int* exact_k_shape [[buffer(7)]],
  const device float16_t* exact_v [[buffer(8)]],
  const device float16_t* sink_k [[buffer(9)]],
  const constant int* sink_k_shape [[buffer(10)]],
  const device float16_t* sink_v [[buffer(11)]],
  const device int32_t* k_table [[buffer(12)]],
  const constant int* k_table_shape [[buffer(13)]],
  const device int32_t* v_table [[buffer(14)]],
  const constant int* v_table_shape [[buffer(15)]],
  const device uint32_t* k_codes [[buffer(16)]],
  const device float* k_codebook [[buffer(17)]],
  const device uint32_t* v_codes [[buffer(18)]],
  const device float* v_codebook [[buffer(19)]],
  const device uint32_t* run_numbers [[buffer(20)]],
  device float* sums [[buffer(21)]],
  device float* tops [[buffer(22)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
