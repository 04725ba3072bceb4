#include "transformer_decoder.cuh"
namespace svexport {
size_t fused_decoder_workspace(const TransformerDecoder&, const DecoderSizes&) { return 0; }
size_t fused_decoder_packed_size(const TransformerDecoder&, const DecoderSizes&) { return 0; }
cudaError_t fused_decoder_pack(const TransformerDecoder&, const DecoderSizes&, void*, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t fused_decoder(const TransformerDecoder&, const DecoderSizes&, const void*, void*, cudaStream_t) { return cudaErrorNotSupported; }
}
