// The part of the CUDA runtime that custom_ops uses outside of kernels, without a GPU: a stream counts what was
// enqueued and what is done, and an event waits for the count that it was recorded at; attributes of kernels are
// kept for a test to look at.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

enum cudaError_t { cudaSuccess = 0, cudaErrorNotReady = 600, cudaErrorLaunchFailure = 719 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeRelaxed = 2 };
constexpr unsigned cudaEventDisableTiming = 2;

struct FakeStream {
  std::atomic<int64_t> enqueued{0}, done{0};
  std::atomic<bool> capturing{false}, broken{false};
};
struct FakeEvent {
  FakeStream* stream = nullptr;
  int64_t target = 0;
};
using cudaStream_t = FakeStream*;
using cudaEvent_t = FakeEvent*;

// The null stream.
inline FakeStream fake_default_stream;
inline FakeStream* fake_stream(FakeStream* stream) { return stream != nullptr ? stream : &fake_default_stream; }

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
  cudaFuncAttributeNonPortableClusterSizeAllowed = 14
};
constexpr int cudaSharedmemCarveoutMaxShared = 100;
// Kernel, device, attribute: value. Each time that one is set counts.
inline std::map<std::tuple<const void*, int, int>, int> fake_attributes;
inline std::atomic<int> fake_attributes_set{0};
inline std::mutex fake_attributes_mutex;

inline thread_local int fake_device = 0;

inline std::atomic<int> fake_events_made{0}, fake_events_alive{0};

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? "launch failure" : "error";
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = fake_device;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  fake_device = device;
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  const std::scoped_lock lock(fake_attributes_mutex);
  ++fake_attributes_set;
  fake_attributes[{kernel, fake_device, attribute}] = value;
  return cudaSuccess;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = fake_stream(stream)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
  std::memset(at, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new FakeEvent;
  ++fake_events_made;
  ++fake_events_alive;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  --fake_events_alive;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->stream = fake_stream(stream);
  event->target = event->stream->enqueued;
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event->stream->broken) return cudaErrorLaunchFailure;
  return event->stream->done >= event->target ? cudaSuccess : cudaErrorNotReady;
}
