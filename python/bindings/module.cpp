#include "bindings.h"

NB_MODULE(_C, module) {
  flashtile::bindings::bind_errors(module);
  flashtile::bindings::bind_tensor(module);
  flashtile::bindings::bind_options(module);
  flashtile::bindings::bind_attention(module);
  flashtile::bindings::bind_kvcache(module);
  flashtile::bindings::bind_explain(module);
  flashtile::bindings::bind_quantize(module);
  flashtile::bindings::bind_merge(module);
  flashtile::bindings::bind_counters(module);
  flashtile::bindings::bind_xla(module);
  flashtile::bindings::bind_info(module);
}
