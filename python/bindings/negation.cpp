#include "negation.h"

namespace flashtile::bindings {

NegativeBit NegativeBit::of(nb::handle type, const dlpack::Exchange& exchange) {
  const nb::module_ torch = nb::module_::import_("torch");
  static const NegativeBit bit = find(exchange);
  const bool plain = type.is(torch.attr("Tensor")) || type.is(torch.attr("nn").attr("Parameter"));
  return plain ? bit : NegativeBit();
}

NegativeBit NegativeBit::find(const dlpack::Exchange& exchange) {
  using namespace nb::literals;
  constexpr int kWords = 16;  // the search ends here: other memory may follow
  NegativeBit bit;
  const nb::module_ torch = nb::module_::import_("torch");
  const nb::object tensor = torch.attr("zeros")(1, 1, 1, 1, "device"_a = "cpu");
  const nb::object set = nb::getattr(torch.attr("_C"), "_set_neg", nb::none());
  dlpack::Tensor shown;
  if (exchange.tensor_from_object(tensor.ptr(), &shown) != 0) throw nb::python_error();
  for (int i = 0; !set.is_none() && i < kWords; ++i) {
    const auto word = [&](bool negated) {
      set(tensor, negated);
      return word_at(shown.shape, i);
    };
    const std::uint64_t without = word(false), with = word(true), changed = with ^ without;
    if (changed == 0) continue;
    const bool one_bit = (changed & (changed - 1)) == 0, is_set = (with & changed) != 0;
    if (one_bit && is_set) bit.offset_ = i, bit.mask_ = changed;
    break;
  }
  return bit;
}

bool is_negated(nb::handle tensor) {
  const nb::object is_neg = nb::getattr(tensor, "is_neg", nb::none());
  return !is_neg.is_none() && nb::cast<bool>(is_neg());
}

}  // namespace flashtile::bindings
