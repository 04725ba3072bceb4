// Included before the entry point, which is a kernel again.
#pragma pop_macro("__grid_constant__")
#pragma pop_macro("__launch_bounds__")
#pragma pop_macro("__global__")
