
template <int bits>
[[kernel]] void custom_kernel_unpack_bits__1_uint32_t_uint32_t_uint32_t(
  const device uint32_t* words [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* codes [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
const uint count = run_numbers[0]; const uint width = run_numbers[1]; const uint total = run_numbers[2];
const uint i = thread_position_in_grid.x;
if (i < total) {
const uint row = i / count, bit = i % count * uint(bits), place = row * width + bit / 32u, shift = bit % 32u;
uint q = words[place] >> shift;
if (shift + uint(bits) > 32u) q |= words[place + 1u] << (32u - shift);
codes[i] = q & ((1u << bits) - 1u);
}

}

template [[host_name("custom_kernel_unpack_bits__1_uint32_t_uint32_t_uint32_t")]] [[kernel]] decltype(custom_kernel_unpack_bits__1_uint32_t_uint32_t_uint32_t<1>) custom_kernel_unpack_bits__1_uint32_t_uint32_t_uint32_t<1>;

// another variant
template <int bits>
[[kernel]] void custom_kernel_unpack_bits__2_uint32_t_uint32_t_uint32_t(
  const device uint32_t* words [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* codes [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_unpack_bits__3_uint32_t_uint32_t_uint32_t(
  const device uint32_t* words [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* codes [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_unpack_bits__4_uint32_t_uint32_t_uint32_t(
  const device uint32_t* words [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* codes [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_unpack_bits__5_uint32_t_uint32_t_uint32_t(
  const device uint32_t* words [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* codes [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_unpack_bits__6_uint32_t_uint32_t_uint32_t(
  const device uint32_t* words [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* codes [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_unpack_bits__7_uint32_t_uint32_t_uint32_t(
  const device uint32_t* words [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* codes [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_unpack_bits__8_uint32_t_uint32_t_uint32_t(
  const device uint32_t* words [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* codes [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_unpack_bits__10_uint32_t_uint32_t_uint32_t(
  const device uint32_t* words [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* codes [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int bits>
[[kernel]] void custom_kernel_unpack_bits__12_uint32_t_uint32_t_uint32_t(
  const device uint32_t* words [[buffer(0)]],
  const device uint32_t* run_numbers [[buffer(1)]],
  device uint32_t* codes [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])
