// Device memory of one run of a node.
//
// The work on it is only enqueued when the run returns, so giving it back means: it may be handed out again for
// later work on the same stream, and for no other. From API 18 on ONNX Runtime's arena knows the stream of such
// a piece. Before, and where the run has no stream of its own, a piece is kept until the stream has passed a mark.
#pragma once

#include <mutex>
#include <vector>

#include "../node.h"
#include "cuda_library.h"

namespace bnexport::adapters {

// Pieces whose streams have not passed them; one list for each node of a session.
class Kept {
 public:
  Kept(ort::Api api, const CudaLibrary& cuda) : api_(api), cuda_(cuda) {}
  // Waits for the streams.
  ~Kept();
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

  // Takes over a piece with its allocator, to give both back when `stream` has done what is on it now; and gives back
  // what streams have passed.
  void keep(ort::Allocator* allocator, void* data, void* stream);

 private:
  struct Piece {
    ort::Allocator* allocator;
    void* data;
    void* mark;  // null: of a captured graph, which uses the piece at each replay
  };
  void sweep();  // with the mutex held
  // Whether it was given back.
  bool release(const Piece& piece, bool wait) const;

  ort::Api api_;
  const CudaLibrary& cuda_;
  std::mutex mutex_;
  std::vector<Piece> pieces_;
};

class Scratch {
 public:
  // `memory`: of a tensor on the device. `tagged`: the API has ContextScratch.
  Scratch(const Run& run, const ort::MemoryInfo* memory, void* stream, bool tagged, size_t workspace, int64_t doubles,
          Kept& kept);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Aligned as the allocator's memory is.
  void* workspace() const { return data_; }
  double* take(int64_t doubles) {
    double* const taken = next_;
    next_ += doubles;
    return taken;
  }

 private:
  ort::Api api_;
  void* stream_;
  bool tagged_;
  Kept& kept_;
  ort::Allocator* allocator_ = nullptr;
  void* data_ = nullptr;
  double* next_ = nullptr;
};

}  // namespace bnexport::adapters
