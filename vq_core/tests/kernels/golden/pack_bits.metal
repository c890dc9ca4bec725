
template <int bits>
[[kernel]] void custom_kernel_pack_bits__1_uint32_t_uint32_t_uint32_t(
  const device uint32_t* codes [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* words [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
const uint count = run_numbers[0]; const uint width = run_numbers[1]; const uint total = run_numbers[2];
const uint i = thread_position_in_grid.x, per = 32u / uint(bits) + 2u;
if (i < total) {
const uint row = i / width, bit = i % width * 32u, first = bit / uint(bits);
uint word = 0u;
for (uint k = 0u; k < per; ++k) {
const uint code = first + k, at = code * uint(bits);
if (at >= bit + 32u || code >= count) break;
const uint q = codes[row * count + code];
word |= at >= bit ? q << (at - bit) : q >> (bit - at);
}
words[i] = word;
}

}

template [[host_name("custom_kernel_pack_bits__1_uint32_t_uint32_t_uint32_t")]] [[kernel]] decltype(custom_kernel_pack_bits__1_uint32_t_uint32_t_uint32_t<1>) custom_kernel_pack_bits__1_uint32_t_uint32_t_uint32_t<1>;

// another variant
template <int bits>
[[kernel]] void custom_kernel_pack_bits__2_uint32_t_uint32_t_uint32_t(
  const device uint32_t* codes [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* words [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_pack_bits__3_uint32_t_uint32_t_uint32_t(
  const device uint32_t* codes [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* words [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_pack_bits__4_uint32_t_uint32_t_uint32_t(
  const device uint32_t* codes [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* words [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_pack_bits__5_uint32_t_uint32_t_uint32_t(
  const device uint32_t* codes [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* words [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_pack_bits__6_uint32_t_uint32_t_uint32_t(
  const device uint32_t* codes [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* words [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_pack_bits__7_uint32_t_uint32_t_uint32_t(
  const device uint32_t* codes [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* words [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_pack_bits__8_uint32_t_uint32_t_uint32_t(
  const device uint32_t* codes [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* words [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_pack_bits__10_uint32_t_uint32_t_uint32_t(
  const device uint32_t* codes [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* words [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_pack_bits__12_uint32_t_uint32_t_uint32_t(
  const device uint32_t* codes [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* words [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])
