// Training of plain networks on a CPU, one client after another, several clients at a time by threads.
//
// A network is a table of layers: first those over pictures (convolution, ReLU, max pooling, closed by Flatten), sample
// by sample, then those over vectors (linear, ReLU), the whole batch at once. Everything a client needs stays in the
// cache of the core that trains it: weights are laid out with rows of whole vectors (the rest is zero and stays zero),
// samples are read where they lie, and the gradient of a dense layer goes from registers straight into the momentum and
// the weights. Plain C++ with the vector extensions of GCC and Clang; no library is called.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

typedef int64_t i64;
#ifdef DOUBLE
typedef double real;
typedef int64_t whole_number;
#define SIZE 8
#else
typedef float real;
typedef int32_t whole_number;
#define SIZE 4
#endif

#if defined(__AVX512F__)
#define BYTES 64
#define MR 8
#define NR 3
#elif defined(__AVX__)
#define BYTES 32
#define MR 4
#define NR 3
#else
#define BYTES 16
#define MR 4
#define NR 2
#endif

typedef real vec __attribute__((vector_size(BYTES)));
typedef real loose __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));
#define V (BYTES / SIZE)

static inline vec load(const real* p) { return *(const loose*)p; }
static inline void store(real* p, vec v) { *(loose*)p = v; }
static inline vec all(real v) { return v - vec{}; }
static inline i64 whole(i64 n) { return (n + V - 1) / V * V; }

// ---- within vectors ----

#if V == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif V == 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#elif V == 4
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#else
#define EVEN 0, 2
#define ODD 1, 3
#define LOW 0, 2
#define HIGH 1, 3
#endif

typedef whole_number places __attribute__((vector_size(BYTES)));
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, places{__VA_ARGS__})
#endif

// All bits of the lanes from `begin` to before `end`.
static inline places lanes(i64 begin, i64 end) {
  whole_number bits[V];
  for (i64 i = 0; i < V; i++) bits[i] = i >= begin && i < end ? -1 : 0;
  places found;
  memcpy(&found, bits, sizeof found);
  return found;
}
static inline vec most(vec a, vec b) { return a < b ? b : a; }
static inline vec only(vec v, places which) { return (vec)((places)v & which); }

// The sums of `Count` vectors, side by side in one: each round adds neighbours, and halves the number of vectors.
template <int Count> static inline vec sums(vec* v) {
  if constexpr (Count == 1) {
    return v[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < Count / 2; i++) v[i] = PICK(v[2 * i], v[2 * i + 1], EVEN) + PICK(v[2 * i], v[2 * i + 1], ODD);
    return sums<Count / 2>(v);
  }
}

// ---- products ----

// Keeps a number in its register: compilers would rather load it again for each use.
#if defined(__x86_64__)
#define HELD(v) asm("" : "+x"(v))
#else
#define HELD(v)
#endif

struct Strided {  // rows of a matrix
  const real* first;
  i64 step;
  const real* operator()(i64 row) const { return first + row * step; }
};
struct Scattered {  // rows that lie anywhere
  const real* const* rows;
  const real* operator()(i64 row) const { return rows[row]; }
};

// result(m, n) = <a(m), b(n)> over `depth` numbers, a multiple of V. Tiles of TM x TN = V sums.
constexpr int TM = V >= 8 ? 4 : 2;
constexpr int TN = V / TM;

template <class A, class B, class Result>
static void inner(i64 rows, i64 columns, i64 depth, A a, B b, Result result) {
  for (i64 n = 0; n < columns; n += TN) {
    const real* right[TN];
    for (int j = 0; j < TN; j++) right[j] = b(n + j < columns ? n + j : columns - 1);
    for (i64 m = 0; m < rows; m += TM) {
      const real* left[TM];
      for (int i = 0; i < TM; i++) left[i] = a(m + i < rows ? m + i : rows - 1);
      vec acc[TM * TN] = {};
      for (i64 k = 0; k < depth; k += V) {
        vec r[TN];
#pragma GCC unroll 4
        for (int j = 0; j < TN; j++) {
          r[j] = load(right[j] + k);
          HELD(r[j]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < TM; i++) {
          vec l = load(left[i] + k);
          HELD(l);
#pragma GCC unroll 4
          for (int j = 0; j < TN; j++) acc[i * TN + j] += l * r[j];
        }
      }
      vec found = sums<V>(acc);
      for (int i = 0; i < TM && m + i < rows; i++)
        for (int j = 0; j < TN && n + j < columns; j++) result(m + i, n + j, found[i * TN + j]);
    }
  }
}

// result(m, n) = sum over k of a[m, k] * b(k)[n], n in whole vectors; a by strides.
template <int M, int N, class B, class Result>
static inline void outer_tile(i64 m, i64 n, i64 depth, const real* a, i64 down, i64 along, B b, Result& result) {
  vec acc[M][N] = {};
  const real* left = a + m * down;
  for (i64 k = 0; k < depth; k++) {
    const real* right = b(k) + n;
    vec r[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) r[j] = load(right + j * V);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      vec l = all(left[i * down + k * along]);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) acc[i][j] += l * r[j];
    }
  }
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++) result(m + i, n + j * V, acc[i][j]);
}

template <int N, class B, class Result>
static inline void outer_panel(i64 n, i64 rows, i64 depth, const real* a, i64 down, i64 along, B b, Result& result) {
  i64 m = 0;
  for (; m + MR <= rows; m += MR) outer_tile<MR, N>(m, n, depth, a, down, along, b, result);
  if (MR > 4 && m + 4 <= rows) outer_tile<4, N>(m, n, depth, a, down, along, b, result), m += 4;
  if (m + 2 <= rows) outer_tile<2, N>(m, n, depth, a, down, along, b, result), m += 2;
  if (m < rows) outer_tile<1, N>(m, n, depth, a, down, along, b, result);
}

template <class B, class Result>
static void outer(i64 rows, i64 columns, i64 depth, const real* a, i64 down, i64 along, B b, Result result) {
  i64 n = 0;
  for (; n + NR * V <= columns; n += NR * V) outer_panel<NR>(n, rows, depth, a, down, along, b, result);
  for (; n < columns; n += V) outer_panel<1>(n, rows, depth, a, down, along, b, result);
}

// The same a few whole rows at a time, so that what `result` touches lies together.
template <class B, class Result>
static void outer_by_rows(i64 rows, i64 columns, i64 depth, const real* a, i64 down, i64 along, B b, Result result) {
  for (i64 m = 0; m < rows; m += MR) {
    auto there = [&](i64 i, i64 n, vec v) { result(m + i, n, v); };
    outer(std::min<i64>(MR, rows - m), columns, depth, a + m * down, down, along, b, there);
  }
}

// ---- the network ----

enum Kind { LINEAR = 0, CONV = 1, RELU = 2, POOL = 3, FLATTEN = 4 };

struct Layer {
  i64 kind;
  i64 in_channels, in_height, in_width;     // of a vector: its length, 1, 1
  i64 out_channels, out_height, out_width;
  i64 high, wide, down, right, pad_y, pad_x;  // of a kernel
  i64 weight, bias;                          // places among the parameters; -1: none
};
constexpr int FIELDS = sizeof(Layer) / sizeof(i64);

struct Slot {  // a parameter: as it comes, and where it lies padded
  i64 rows, columns, at;
  i64 step() const { return whole(columns); }
};

struct Net {
  std::vector<Layer> layers;
  std::vector<Slot> slots;
  i64 split = 0;         // layers before it are over pictures
  i64 size = 0;          // of all parameters, padded
  i64 sample = 0;        // numbers of a sample as it comes
  i64 kept = 0;          // numbers that a sample leaves on its way through the picture layers
  std::vector<i64> out;  // where a layer's output lies there
  i64 largest = 0;       // of one layer's output of one sample, padded
  i64 patches = 0;       // largest matrix of patches
  i64 frame = 0;         // largest picture with its border
  i64 width = 0;         // longest vector, padded
  i64 outputs = 0;
  i64 first = 0;         // the first layer with parameters: below it no gradient is needed

  static i64 plane(i64 h, i64 w) { return whole(h * w); }
  static i64 inside(const Layer& l) { return l.in_channels * plane(l.in_height, l.in_width); }
  static i64 after(const Layer& l) { return l.out_channels * plane(l.out_height, l.out_width); }

  Net(const i64* table, i64 count) {
    for (i64 i = 0; i < count; i++) {
      Layer l;
      memcpy((void*)&l, table + i * FIELDS, sizeof(Layer));
      layers.push_back(l);
    }
    const Layer& head = layers.front();
    sample = head.in_channels * head.in_height * head.in_width;
    for (i64 i = 0; i < count; i++)
      if (layers[i].kind == FLATTEN) split = i + 1;
    while (first < count && layers[first].weight < 0) first++;
    out.assign(count, 0);
    for (i64 i = 0; i < count; i++) {
      const Layer& l = layers[i];
      if (l.kind == LINEAR) {
        add(l.weight, l.out_channels, l.in_channels);
        add(l.bias, 1, l.out_channels);
      } else if (l.kind == CONV) {
        i64 depth = l.in_channels * l.high * l.wide;
        add(l.weight, l.out_channels, depth);
        add(l.bias, 1, l.out_channels);
        i64 size = depth * plane(l.out_height, l.out_width);
        patches = std::max(patches, size);
        frame = std::max(frame, l.in_channels * (l.in_height + 2 * l.pad_y) * (l.in_width + 2 * l.pad_x));
      }
      if (i < split) {
        if (l.kind == RELU && i > 0) {
          out[i] = out[i - 1];
        } else if (l.kind != FLATTEN) {  // its output lies in `flats`
          out[i] = kept, kept += after(l);
        }
        largest = std::max(largest, std::max(inside(l), after(l)));
        if (l.kind == FLATTEN) width = std::max(width, whole(l.out_channels));
      } else {
        width = std::max(width, std::max(whole(l.in_channels), whole(l.out_channels)));
      }
    }
    outputs = layers.back().out_channels;
    for (Slot& slot : slots) slot.at = size, size += slot.rows * slot.step();
  }

  void add(i64 place, i64 rows, i64 columns) {
    if (place < 0) return;
    if ((i64)slots.size() <= place) slots.resize(place + 1);
    slots[place] = Slot{rows, columns, 0};
  }
};

// ---- memory of a thread ----

constexpr i64 SLACK = 128;  // whole vectors are read and written a little beyond the end

struct Memory {
  std::vector<std::pair<void*, size_t>> held;
  real* take(size_t place, i64 count) {
    size_t bytes = ((count + SLACK) * sizeof(real) + 4095) / 4096 * 4096;
    if (held.size() <= place) held.resize(place + 1, {nullptr, 0});
    if (held[place].second < bytes) {
      free(held[place].first);
      held[place] = {nullptr, 0};
      void* found = aligned_alloc(4096, bytes);
      if (!found) throw std::bad_alloc();
      held[place] = {found, bytes};
    }
    return (real*)held[place].first;
  }
  ~Memory() {
    for (auto& one : held) free(one.first);
  }
};

static std::mutex guard;
static std::vector<Memory*> idle;

struct Lease {  // memory is handed on from call to call: fresh pages cost more than filling them
  Memory* memory;
  Lease() {
    std::lock_guard<std::mutex> lock(guard);
    if (idle.empty()) {
      memory = new Memory();
    } else {
      memory = idle.back();
      idle.pop_back();
    }
  }
  ~Lease() {
    std::lock_guard<std::mutex> lock(guard);
    idle.push_back(memory);
  }
};

// ---- what is done with a gradient ----

struct Step {
  real* weights;        // moved, padded
  real* speed;          // momentum, or null
  real* gradient;       // null: step at once; else gradients go here
  const real* anchor;   // null, or where the call started
  const real* extra;    // null, or a correction
  real lr, momentum, decay, pull;

  void at(i64 place, vec g) const {
    if (gradient) {
      store(gradient + place, g);
      return;
    }
    vec w = load(weights + place);
    if (anchor) g += pull * (w - load(anchor + place));
    if (extra) g += load(extra + place);
    if (decay != 0) g += decay * w;
    if (speed) {
      g += momentum * load(speed + place);
      store(speed + place, g);
    }
    store(weights + place, w - lr * g);
  }
};

// ---- one client ----

enum Use { OUTPUTS, INPUT_GRADIENTS, TRAINING };  // what memory a client needs

struct Client {
  const Net& net;
  i64 batch;  // most samples at a time
  i64 apart;  // of two samples in `kept`; 0: only outputs are wanted, and each sample writes over the one before it
  real *weights, *speed, *gradient, *anchor, *extra, *inner_weights;
  real *kept, *patches, *framed, *one, *other, *flats, *vectors, *laid, *deltas, *sum;
  std::vector<const real*> rows;                 // samples as they lie
  std::vector<std::vector<const real*>> inputs;  // of each vector layer, by sample
  std::vector<i64> labels;
  std::vector<real> shares;  // of each sample in the loss

  Client(const Net& net, i64 batch, Memory& memory, Use use) : net(net), batch(batch) {
    i64 p = net.size, vector_layers = (i64)net.layers.size() - net.split;
    apart = use == OUTPUTS ? 0 : net.kept;
    weights = memory.take(0, p);
    memset(weights, 0, p * sizeof(real));
    i64 all_kept = use == OUTPUTS ? net.kept : net.kept * batch;
    kept = memory.take(1, all_kept);
    patches = memory.take(2, net.patches);
    framed = memory.take(14, net.frame);
    one = memory.take(3, net.largest);
    vectors = memory.take(5, vector_layers * batch * net.width);
    memset(vectors, 0, vector_layers * batch * net.width * sizeof(real));
    memset(kept, 0, all_kept * sizeof(real));
    if (net.split) {
      flats = memory.take(15, batch * net.width);
      memset(flats, 0, batch * net.width * sizeof(real));
    }
    if (!net.split && net.sample % V) {  // samples with a rest are laid out in whole vectors
      laid = memory.take(13, batch * whole(net.sample));
      memset(laid, 0, batch * whole(net.sample) * sizeof(real));
    }
    if (use != OUTPUTS) {
      other = memory.take(4, net.largest);
      deltas = memory.take(6, 2 * batch * net.width);
      memset(deltas, 0, 2 * batch * net.width * sizeof(real));
    }
    if (use == TRAINING) {
      speed = memory.take(7, p);
      gradient = memory.take(8, p);
      anchor = memory.take(9, p);
      extra = memory.take(10, p);
      inner_weights = memory.take(11, p);
      sum = memory.take(12, p);
    }
    rows.resize(batch);
    labels.resize(batch);
    shares.resize(batch);
    inputs.assign(vector_layers + 1, std::vector<const real*>(batch));
  }

  // Parameters as they come -> padded, and back.
  void pack(real* to, const real* const* from) const {
    for (size_t i = 0; i < net.slots.size(); i++) {
      const Slot& s = net.slots[i];
      for (i64 r = 0; r < s.rows; r++) {
        real* row = to + s.at + r * s.step();
        memcpy(row, from[i] + r * s.columns, s.columns * sizeof(real));
        memset(row + s.columns, 0, (s.step() - s.columns) * sizeof(real));
      }
    }
  }
  void unpack(real* const* to, const real* from) const {
    for (size_t i = 0; i < net.slots.size(); i++) {
      const Slot& s = net.slots[i];
      for (i64 r = 0; r < s.rows; r++)
        memcpy(to[i] + r * s.columns, from + s.at + r * s.step(), s.columns * sizeof(real));
    }
  }

  const real* weight(const real* all_weights, const Layer& l) const { return all_weights + net.slots[l.weight].at; }
  const real* bias(const real* all_weights, const Layer& l) const {
    return l.bias < 0 ? nullptr : all_weights + net.slots[l.bias].at;
  }

  // A picture with its border of zeros, so that patches need not look where they are.
  static i64 framed_width(const Layer& l) { return l.in_width + 2 * l.pad_x; }
  static i64 framed_plane(const Layer& l) { return (l.in_height + 2 * l.pad_y) * framed_width(l); }

  void frame(const Layer& l, const real* x, i64 plane) {
    i64 width = framed_width(l), whole_plane = framed_plane(l);
    if (l.pad_y || l.pad_x) memset(framed, 0, l.in_channels * whole_plane * sizeof(real));
    for (i64 c = 0; c < l.in_channels; c++) {
      real* to = framed + c * whole_plane + l.pad_y * width + l.pad_x;
      if (width == l.in_width) {
        memcpy(to, x + c * plane, l.in_height * l.in_width * sizeof(real));
      } else {
        for (i64 y = 0; y < l.in_height; y++)
          memcpy(to + y * width, x + c * plane + y * l.in_width, l.in_width * sizeof(real));
      }
    }
  }

  // Patches [I * high * wide, plane of the output] of the framed picture. Rows are written in whole vectors: what goes
  // beyond a row is written again by the next one.
  void make_patches(const Layer& l, const real* x, i64 plane) {
    frame(l, x, plane);
    i64 columns = Net::plane(l.out_height, l.out_width), width = framed_width(l);
    real* row = patches;
    for (i64 c = 0; c < l.in_channels; c++)
      for (i64 ky = 0; ky < l.high; ky++)
        for (i64 kx = 0; kx < l.wide; kx++, row += columns) {
          const real* from = framed + c * framed_plane(l) + ky * width + kx;
          real* to = row;
          for (i64 y = 0; y < l.out_height; y++, from += l.down * width, to += l.out_width) {
            if (l.right == 1) {
              for (i64 i = 0; i < l.out_width; i += V) store(to + i, load(from + i));
            } else {
              for (i64 i = 0; i < l.out_width; i++) to[i] = from[i * l.right];
            }
          }
          store(to, vec{});  // the rest of the plane
        }
  }

  // The other way: what a pixel gets from the gradients of all patches it was in.
  void add_patches(const Layer& l, const real* found, real* x, i64 plane) {
    constexpr i64 most = 8, widest = 11;
    i64 columns = Net::plane(l.out_height, l.out_width);
    if (l.down != 1 || l.right != 1 || l.wide > widest || l.in_width > most * V) {
      add_patches_with_gaps(l, found, x, plane);
      return;
    }
    places mine[most][widest];  // lanes whose pixel is in a patch at this place of the kernel
    for (i64 at = 0; at < l.in_width; at += V)
      for (i64 kx = 0; kx < l.wide; kx++)
        mine[at / V][kx] = lanes(kx - l.pad_x - at, std::min(l.out_width + kx - l.pad_x, l.in_width) - at);
    for (i64 c = 0; c < l.in_channels; c++)
      for (i64 y = 0; y < l.in_height; y++) {
        i64 begin = std::max<i64>(0, y + l.pad_y - l.out_height + 1), end = std::min(l.high, y + l.pad_y + 1);
        for (i64 at = 0; at < l.in_width; at += V) {
          vec total = {};
          for (i64 ky = begin; ky < end; ky++) {
            const real* from = found + (c * l.high + ky) * l.wide * columns;
            from += (y + l.pad_y - ky) * l.out_width + at + l.pad_x;
            for (i64 kx = 0; kx < l.wide; kx++) total += only(load(from + kx * (columns - 1)), mine[at / V][kx]);
          }
          store(x + c * plane + y * l.in_width + at, total);  // beyond the row: zeros, written again by the next one
        }
      }
  }

  void add_patches_with_gaps(const Layer& l, const real* found, real* x, i64 plane) {
    i64 columns = Net::plane(l.out_height, l.out_width), width = framed_width(l);
    memset(framed, 0, l.in_channels * framed_plane(l) * sizeof(real));
    const real* row = found;
    for (i64 c = 0; c < l.in_channels; c++)
      for (i64 ky = 0; ky < l.high; ky++)
        for (i64 kx = 0; kx < l.wide; kx++, row += columns)
          for (i64 y = 0; y < l.out_height; y++) {
            real* to = framed + c * framed_plane(l) + (y * l.down + ky) * width + kx;
            for (i64 i = 0; i < l.out_width; i++) to[i * l.right] += row[y * l.out_width + i];
          }
    for (i64 c = 0; c < l.in_channels; c++) {
      const real* from = framed + c * framed_plane(l) + l.pad_y * width + l.pad_x;
      for (i64 y = 0; y < l.in_height; y++)
        memcpy(x + c * plane + y * l.in_width, from + y * width, l.in_width * sizeof(real));
      for (i64 i = l.in_height * l.in_width; i < plane; i++) x[c * plane + i] = 0;
    }
  }

  static i64 came(const Layer& l, bool is_sample) {  // distance of the planes of a layer's input
    return is_sample ? l.in_height * l.in_width : Net::plane(l.in_height, l.in_width);
  }

  void picture(const real* w, i64 b) {
    real* mine = kept + b * apart;
    const real* x = rows[b];
    bool is_sample = true;  // planes of a sample have no padding
    for (i64 i = 0; i < net.split; i++) {
      const Layer& l = net.layers[i];
      real* to = l.kind == FLATTEN ? flats + b * net.width : mine + net.out[i];
      i64 plane = came(l, is_sample), next = Net::plane(l.out_height, l.out_width);
      if (l.kind == CONV) {
        make_patches(l, x, plane);
        i64 depth = l.in_channels * l.high * l.wide;
        const real *matrix = weight(w, l), *shift = bias(w, l);
        i64 step = net.slots[l.weight].step();
        outer(l.out_channels, next, depth, matrix, step, 1, Strided{patches, next},
              [=](i64 m, i64 n, vec v) { store(to + m * next + n, shift ? v + shift[m] : v); });
      } else if (l.kind == RELU) {
        for (i64 c = 0; c < l.in_channels; c++)
          for (i64 j = 0; j < l.in_height * l.in_width; j++)
            to[c * next + j] = x[c * plane + j] < 0 ? 0 : x[c * plane + j];
      } else if (l.kind == POOL) {
        pool(l, x, plane, to, next);
      } else {
        for (i64 c = 0; c < l.in_channels; c++)
          memcpy(to + c * l.in_height * l.in_width, x + c * plane, l.in_height * l.in_width * sizeof(real));
      }
      x = to;
      is_sample = false;
    }
  }

  static void pool(const Layer& l, const real* x, i64 plane, real* to, i64 next) {
    for (i64 c = 0; c < l.in_channels; c++)
      for (i64 y = 0; y < l.out_height; y++) {
        const real* from = x + c * plane + y * l.high * l.in_width;
        real* row = to + c * next + y * l.out_width;
        if (l.high == 2) {  // in whole vectors: what goes beyond a row is written again by the next one
          for (i64 i = 0; i < l.out_width; i += V) {
            vec a = load(from + 2 * i), b = load(from + 2 * i + V);
            const real* below = from + l.in_width;
            vec c = load(below + 2 * i), d = load(below + 2 * i + V);
            vec e = most(PICK(a, b, EVEN), PICK(a, b, ODD)), f = most(PICK(c, d, EVEN), PICK(c, d, ODD));
            store(row + i, most(e, f));
          }
          continue;
        }
        for (i64 i = 0; i < l.out_width; i++) {
          real best = from[i * l.wide];
          for (i64 ky = 0; ky < l.high; ky++)
            for (i64 kx = 0; kx < l.wide; kx++) {
              real v = from[ky * l.in_width + i * l.wide + kx];
              best = v > best ? v : best;
            }
          row[i] = best;
        }
      }
  }

  // Of equal values the first one gets the gradient.
  static void pool_back(const Layer& l, const real* x, i64 plane, const real* top,
                        const real* delta, i64 next, real* below) {
    memset(below, 0, l.in_channels * plane * sizeof(real));
    for (i64 c = 0; c < l.in_channels; c++)
      for (i64 y = 0; y < l.out_height; y++) {
        i64 at = c * plane + y * l.high * l.in_width, from = c * next + y * l.out_width;
        if (l.high == 2) {
          const real *a = x + at, *b = a + l.in_width;
          real *to = below + at, *under = to + l.in_width;
          // From the last vector to the first: zeros that go beyond a row are written over by what belongs there.
          for (i64 i = (l.out_width - 1) / V * V; i >= 0; i -= V) {
            places mine = lanes(0, l.out_width - i);
            vec best = load(top + from + i), d = only(load(delta + from + i), mine);
            vec a0 = load(a + 2 * i), a1 = load(a + 2 * i + V), b0 = load(b + 2 * i), b1 = load(b + 2 * i + V);
            places p = PICK(a0, a1, EVEN) == best, q = ~p & (PICK(a0, a1, ODD) == best);
            places r = ~p & ~q & (PICK(b0, b1, EVEN) == best), s = ~p & ~q & ~r;
            vec dp = only(d, p), dq = only(d, q), dr = only(d, r), ds = only(d, s);
            store(to + 2 * i, PICK(dp, dq, LOW)), store(to + 2 * i + V, PICK(dp, dq, HIGH));
            store(under + 2 * i, PICK(dr, ds, LOW)), store(under + 2 * i + V, PICK(dr, ds, HIGH));
          }
          continue;
        }
        for (i64 i = 0; i < l.out_width; i++) {
          i64 first = -1;
          for (i64 ky = 0; ky < l.high && first < 0; ky++)
            for (i64 kx = 0; kx < l.wide && first < 0; kx++) {
              i64 place = at + ky * l.in_width + i * l.wide + kx;
              if (x[place] == top[from + i]) first = place;
            }
          if (first >= 0) below[first] = delta[from + i];
        }
      }
  }

  // Outputs of `count` samples are in inputs.back() after it.
  void forward(const real* w, i64 count) {
    i64 layers = net.layers.size();
    if (net.split) {
      for (i64 b = 0; b < count; b++) {
        picture(w, b);
        inputs[0][b] = flats + b * net.width;
      }
    } else if (net.sample % V == 0) {
      for (i64 b = 0; b < count; b++) inputs[0][b] = rows[b];
    } else {
      for (i64 b = 0; b < count; b++) {
        memcpy(laid + b * whole(net.sample), rows[b], net.sample * sizeof(real));
        inputs[0][b] = laid + b * whole(net.sample);
      }
    }
    for (i64 i = net.split; i < layers; i++) {
      const Layer& l = net.layers[i];
      auto& from = inputs[i - net.split];
      auto& next = inputs[i - net.split + 1];
      real* to = vectors + (i - net.split) * batch * net.width;
      for (i64 b = 0; b < count; b++) next[b] = to + b * net.width;
      if (l.kind == LINEAR) {
        const real* shift = bias(w, l);
        i64 step = net.slots[l.weight].step(), width = net.width;
        inner(count, l.out_channels, step, Scattered{from.data()}, Strided{weight(w, l), step},
              [=](i64 m, i64 n, real v) { to[m * width + n] = shift ? v + shift[n] : v; });
        for (i64 b = 0; b < count; b++)
          for (i64 j = l.out_channels; j < whole(l.out_channels); j++) to[b * width + j] = 0;
      } else {
        for (i64 b = 0; b < count; b++) {
          const real* x = from[b];
          real* row = to + b * net.width;
          for (i64 j = 0; j < whole(l.in_channels); j++) row[j] = x[j] < 0 ? 0 : x[j];
        }
      }
    }
  }

  // The gradient of a sample's loss with respect to its outputs.
  void output_error(i64 b, real* d) const {
    const real* y = inputs.back()[b];
    i64 classes = net.outputs;
    real top = y[0], total = 0;
    for (i64 j = 1; j < classes; j++) top = y[j] > top ? y[j] : top;
    for (i64 j = 0; j < classes; j++) total += d[j] = std::exp(y[j] - top);
    real share = shares[b] / total;
    for (i64 j = 0; j < classes; j++) d[j] *= share;
    d[labels[b]] -= shares[b];
    for (i64 j = classes; j < whole(classes); j++) d[j] = 0;
  }

  // The loss of a sample, after `forward`.
  real loss(i64 b) const {
    const real* y = inputs.back()[b];
    real top = y[0], total = 0;
    for (i64 j = 1; j < net.outputs; j++) top = y[j] > top ? y[j] : top;
    for (i64 j = 0; j < net.outputs; j++) total += std::exp(y[j] - top);
    return std::log(total) - (y[labels[b]] - top);
  }

  // The gradient of each sample's loss with respect to the sample itself, after `forward`; `result(b, gradient)` gets
  // it as the sample lies. Samples that are not `wanted` are left out. No gradient of a weight is computed.
  template <class Result> void input_gradients(const real* w, i64 count, const std::vector<bool>& wanted, Result result) {
    real *delta = deltas, *below = deltas + batch * net.width;
    i64 width = net.width;
    for (i64 b = 0; b < count; b++) output_error(b, delta + b * width);
    for (i64 i = (i64)net.layers.size() - 1; i >= net.split; i--) {
      const Layer& l = net.layers[i];
      if (l.kind == RELU) {
        relu_back(i, count, delta);
        continue;
      }
      const Slot& slot = net.slots[l.weight];
      i64 row = slot.step();
      real* to = below;
      outer(count, row, l.out_channels, delta, width, 1, Strided{w + slot.at, row},
            [=](i64 m, i64 n, vec v) { store(to + m * width + n, v); });
      std::swap(delta, below);
    }
    for (i64 b = 0; b < count; b++) {
      if (!wanted[b]) continue;
      const real* own = delta + b * width;
      result(b, net.split ? picture_input_gradient(w, b, own) : own);
    }
  }

  const real* picture_input_gradient(const real* w, i64 b, const real* delta) {
    real* mine = kept + b * apart;
    real *now = one, *below = other;
    for (i64 i = net.split - 1; i >= 0; i--) {
      const Layer& l = net.layers[i];
      const real* x = i ? mine + net.out[i - 1] : rows[b];
      i64 plane = came(l, i == 0), next = Net::plane(l.out_height, l.out_width);
      if (l.kind == CONV) {
        const Slot& slot = net.slots[l.weight];
        i64 step = slot.step();
        real* found = patches;
        outer(slot.columns, next, l.out_channels, w + slot.at, 1, step, Strided{now, next},
              [=](i64 m, i64 n, vec v) { store(found + m * next + n, v); });
        add_patches(l, found, below, plane);
        std::swap(now, below);
      } else {
        plain_back(l, x, plane, mine + net.out[i], next, delta, now, below);
        if (i == 0 && l.kind == RELU && plane != next)  // planes of a sample have no padding
          for (i64 c = 1; c < l.in_channels; c++) memmove(now + c * plane, now + c * next, plane * sizeof(real));
      }
    }
    return now;
  }

  // Back through a ReLU over vectors.
  void relu_back(i64 i, i64 count, real* delta) const {
    i64 length = whole(net.layers[i].in_channels);
    for (i64 b = 0; b < count; b++) {
      const real* y = inputs[i - net.split + 1][b];
      real* d = delta + b * net.width;
      for (i64 j = 0; j < length; j++) d[j] = y[j] <= 0 ? 0 : d[j];
    }
  }

  // Back through a picture layer without parameters; `now` is the gradient of its output, then that of its input.
  void plain_back(const Layer& l, const real* x, i64 plane, const real* y, i64 next, const real* delta,
                  real*& now, real*& below) const {
    if (l.kind == FLATTEN) {
      for (i64 c = 0; c < l.in_channels; c++) {
        memcpy(now + c * plane, delta + c * l.in_height * l.in_width, l.in_height * l.in_width * sizeof(real));
        for (i64 j = l.in_height * l.in_width; j < plane; j++) now[c * plane + j] = 0;
      }
    } else if (l.kind == RELU) {
      for (i64 j = 0; j < l.in_channels * next; j++) now[j] = y[j] <= 0 ? 0 : now[j];
    } else {
      pool_back(l, x, plane, y, now, next, below);
      std::swap(now, below);
    }
  }

  // The gradient of the mean loss of the samples in hand at `w`, given to `step` as it comes.
  void backward(const real* w, i64 count, const Step& step) {
    i64 layers = net.layers.size();
    real *delta = deltas, *below = deltas + batch * net.width;
    for (i64 b = 0; b < count; b++) output_error(b, delta + b * net.width);
    for (i64 i = layers - 1; i >= net.split && i >= net.first; i--) {
      const Layer& l = net.layers[i];
      if (l.kind == RELU) {
        relu_back(i, count, delta);
        continue;
      }
      const Slot& slot = net.slots[l.weight];
      i64 row = slot.step(), width = net.width;
      if (i > net.first) {
        outer(count, row, l.out_channels, delta, width, 1, Strided{w + slot.at, row},
              [=](i64 m, i64 n, vec v) { store(below + m * width + n, v); });
      }
      outer_by_rows(l.out_channels, row, count, delta, 1, width, Scattered{inputs[i - net.split].data()},
            [&](i64 m, i64 n, vec v) { step.at(slot.at + m * row + n, v); });
      if (l.bias >= 0) {
        i64 at = net.slots[l.bias].at;
        for (i64 n = 0; n < whole(l.out_channels); n += V) {
          vec g = {};
          for (i64 b = 0; b < count; b++) g += load(delta + b * width + n);
          step.at(at + n, g);
        }
      }
      std::swap(delta, below);
    }
    if (net.first >= net.split) return;
    // Pictures: gradients of all samples are added up, then there is one step.
    for (i64 i = net.first; i < net.split; i++) {
      const Layer& l = net.layers[i];
      if (l.kind != CONV) continue;
      const Slot& slot = net.slots[l.weight];
      memset(sum + slot.at, 0, slot.rows * slot.step() * sizeof(real));
      if (l.bias >= 0) memset(sum + net.slots[l.bias].at, 0, net.slots[l.bias].step() * sizeof(real));
    }
    for (i64 b = 0; b < count; b++) picture_back(w, b, delta + b * net.width);
    for (i64 i = net.split - 1; i >= net.first; i--) {
      const Layer& l = net.layers[i];
      if (l.kind != CONV) continue;
      for (i64 place : {l.weight, l.bias}) {
        if (place < 0) continue;
        const Slot& slot = net.slots[place];
        for (i64 j = 0; j < slot.rows * slot.step(); j += V) step.at(slot.at + j, load(sum + slot.at + j));
      }
    }
  }

  void picture_back(const real* w, i64 b, const real* delta) {
    real* mine = kept + b * apart;
    real *now = one, *below = other;
    for (i64 i = net.split - 1; i >= net.first; i--) {
      const Layer& l = net.layers[i];
      const real* x = i ? mine + net.out[i - 1] : rows[b];
      i64 plane = came(l, i == 0), next = Net::plane(l.out_height, l.out_width);
      if (l.kind != CONV) {
        plain_back(l, x, plane, mine + net.out[i], next, delta, now, below);
      } else {
        const Slot& slot = net.slots[l.weight];
        i64 depth = slot.columns, step = slot.step();
        make_patches(l, x, plane);
        real* total = sum + slot.at;
        inner(l.out_channels, depth, next, Strided{now, next}, Strided{patches, next},
              [=](i64 m, i64 n, real v) { total[m * step + n] += v; });
        if (l.bias >= 0) {
          real* shift = sum + net.slots[l.bias].at;
          for (i64 c = 0; c < l.out_channels; c++) {
            vec g = {};
            for (i64 j = 0; j < next; j += V) g += load(now + c * next + j);
            real all_of_it = 0;
            for (int j = 0; j < V; j++) all_of_it += g[j];
            shift[c] += all_of_it;
          }
        }
        if (i > net.first) {
          real* found = patches;  // patches of this picture are not needed any more
          const real* d = now;
          outer(depth, next, l.out_channels, w + slot.at, 1, step, Strided{d, next},
                [=](i64 m, i64 n, vec v) { store(found + m * next + n, v); });
          add_patches(l, found, below, plane);
          std::swap(now, below);
        }
      }
    }
  }
};

// ---- the order of samples: as `coterie.randomness` has it, bit by bit ----

typedef uint64_t u64;

static inline u64 mix(u64 v) {
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9u;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBu;
  return v ^ (v >> 31);
}

struct Order {
  i64 epoch = -1;
  std::vector<std::pair<u64, int32_t>> drawn;

  void draw(u64 key, i64 wanted, i64 size) {
    if (epoch == wanted) return;
    epoch = wanted;
    drawn.resize(size);
    u64 own = mix(key + (u64)wanted);
    for (i64 j = 0; j < size; j++) drawn[j] = {mix(own + (u64)(j + 1) * 0x9E3779B97F4A7C15u) >> 1, (int32_t)j};
    std::sort(drawn.begin(), drawn.end());  // ties by place, as a stable sort has them
  }
};

// ---- what is called from outside ----

template <class Work> static int over_clients(i64 count, i64 threads, Work work) {
  std::atomic<i64> next(0);
  std::atomic<int> failed(0);
  auto loop = [&] {
    try {
      Lease lease;
      for (i64 i = next++; i < count; i = next++) work(i, *lease.memory);
    } catch (...) {
      failed = 1;
    }
  };
  i64 more = std::min(threads, count) - 1;
  std::vector<std::thread> others;
  try {
    for (i64 i = 0; i < more; i++) others.emplace_back(loop);
  } catch (...) {  // no more threads to be had: those that are do it
  }
  loop();
  for (auto& other : others) other.join();
  return failed;
}

extern "C" {

// Trains `clients` from start[i] (rows `start_step` apart; 0: all from the same) into result[i] (rows of `size`).
// keys, more_keys: of each client's order of samples in the first and second stream; null: as they lie.
// inner_lr > 0: first-order MAML, with the second stream for the outer gradient.
int train(const i64* table, i64 layers, i64 size, i64 clients, i64 threads, const i64* offsets, const real* start,
          i64 start_step, real* result, const real* x, const i64* y, const i64* first, const i64* sizes,
          const i64* per_epoch, const i64* batch, const i64* steps, const u64* keys, const u64* more_keys, double lr, double momentum, double decay, const real* pull, const real* correction,
          i64 correction_step, double inner_lr) {
  try {
    Net net(table, layers);
    size_t slots = net.slots.size();
    return over_clients(clients, threads, [&](i64 i, Memory& memory) {
      Client client(net, std::min(batch[i], sizes[i]), memory, TRAINING);
      std::vector<const real*> from(slots);
      std::vector<real*> to(slots);
      for (size_t s = 0; s < slots; s++) from[s] = start + i * start_step + offsets[s];
      client.pack(client.weights, from.data());
      Step step{client.weights, nullptr, nullptr, nullptr, nullptr, (real)lr, (real)momentum, (real)decay, 0};
      if (momentum != 0) {
        memset(client.speed, 0, net.size * sizeof(real));
        step.speed = client.speed;
      }
      if (pull) {
        memcpy(client.anchor, client.weights, net.size * sizeof(real));
        step.anchor = client.anchor, step.pull = pull[i];
      }
      if (correction) {
        for (size_t s = 0; s < slots; s++) from[s] = correction + i * correction_step + offsets[s];
        client.pack(client.extra, from.data());
        step.extra = client.extra;
      }
      Order order, more_order;
      auto take = [&](Order& order, const u64* keys, i64 at) {
        i64 begin = at % per_epoch[i] * batch[i], count = std::min(batch[i], sizes[i] - begin);
        if (keys) order.draw(keys[i], at / per_epoch[i], sizes[i]);
        for (i64 b = 0; b < count; b++) {
          i64 row = first[i] + (keys ? order.drawn[begin + b].second : begin + b);
          client.rows[b] = x + row * net.sample;
          client.labels[b] = y[row];
          client.shares[b] = (real)1 / count;
        }
        return count;
      };
      for (i64 at = 0; at < steps[i]; at++) {
        i64 count = take(order, keys, at);
        client.forward(client.weights, count);
        if (inner_lr <= 0) {
          client.backward(client.weights, count, step);
          continue;
        }
        Step collect{client.weights, nullptr, client.gradient, nullptr, nullptr, 0, 0, 0, 0};
        client.backward(client.weights, count, collect);
        for (i64 j = 0; j < net.size; j++)
          client.inner_weights[j] = client.weights[j] - (real)inner_lr * client.gradient[j];
        count = take(more_order, more_keys, at);
        client.forward(client.inner_weights, count);
        client.backward(client.inner_weights, count, step);
      }
      for (size_t s = 0; s < slots; s++) to[s] = result + i * size + offsets[s];
      client.unpack(to.data(), client.weights);
    });
  } catch (...) {
    return 1;
  }
}

// Gradients of mean losses, weighted by `mask` [clients, batch] if there is one; parameters [clients, numel] each.
int gradients(const i64* table, i64 layers, i64 clients, i64 threads, i64 batch, const real* const* params,
              const i64* numel, real* const* found, const real* x, i64 x_step, const i64* y, const real* mask) {
  try {
    Net net(table, layers);
    size_t slots = net.slots.size();
    return over_clients(clients, threads, [&](i64 i, Memory& memory) {
      Client client(net, batch, memory, TRAINING);
      std::vector<const real*> from(slots);
      std::vector<real*> to(slots);
      for (size_t s = 0; s < slots; s++) from[s] = params[s] + i * numel[s], to[s] = found[s] + i * numel[s];
      client.pack(client.weights, from.data());
      real total = 0;
      for (i64 b = 0; b < batch; b++) total += mask ? mask[i * batch + b] : 1;
      for (i64 b = 0; b < batch; b++) {
        client.rows[b] = x + i * x_step + b * net.sample;
        client.labels[b] = y[i * batch + b];
        client.shares[b] = (mask ? mask[i * batch + b] : 1) / (total > 1 ? total : 1);
      }
      client.forward(client.weights, batch);
      Step collect{client.weights, nullptr, client.gradient, nullptr, nullptr, 0, 0, 0, 0};
      client.backward(client.weights, batch, collect);
      client.unpack(to.data(), client.gradient);
    });
  } catch (...) {
    return 1;
  }
}

// Outputs [models, samples, L]; inputs of a model are `x_step` after those of the one before it (0: the same).
int outputs(const i64* table, i64 layers, i64 models, i64 threads, const i64* offsets, const real* flat,
            i64 flat_step, const real* x, i64 x_step, i64 samples, real* result) {
  try {
    Net net(table, layers);
    size_t slots = net.slots.size();
    const i64 tile = 32, share = 8 * tile;  // samples at a time, and of one piece of work
    i64 pieces = (samples + share - 1) / share;
    return over_clients(models * pieces, threads, [&](i64 number, Memory& memory) {
      i64 i = number / pieces, begin = number % pieces * share, end = std::min(begin + share, samples);
      Client client(net, std::min(tile, end - begin), memory, OUTPUTS);
      std::vector<const real*> from(slots);
      for (size_t s = 0; s < slots; s++) from[s] = flat + i * flat_step + offsets[s];
      client.pack(client.weights, from.data());
      for (i64 at = begin; at < end; at += tile) {
        i64 count = std::min(tile, end - at);
        for (i64 b = 0; b < count; b++) client.rows[b] = x + i * x_step + (at + b) * net.sample;
        client.forward(client.weights, count);
        for (i64 b = 0; b < count; b++)
          memcpy(result + (i * samples + at + b) * net.outputs, client.inputs.back()[b], net.outputs * sizeof(real));
      }
    });
  } catch (...) {
    return 1;
  }
}
// Moves samples x [models, samples, D] by Adam until their model classifies them as `labels` [samples]. The loss of a
// sample is its cross-entropy + pull * ||x - mean||. A step is m / (sqrt(v) * slope[t] + floor[t]). A sample takes at
// least `least` steps, and stops when its cross-entropy is below `enough`, or after `most` steps. What becomes of a
// sample depends on no other sample. steps [models, samples]: how many each took.
int search(const i64* table, i64 layers, i64 models, i64 threads, const i64* offsets, const real* flat, i64 flat_step,
           i64 samples, real* x, const i64* labels, const real* mean, double pull, const real* slope,
           const real* floor, i64 least, i64 most, double enough, i64* steps) {
  try {
    Net net(table, layers);
    size_t slots = net.slots.size();
    const i64 tile = 16;  // samples at a time: what they leave in the layers should stay in a cache
    i64 pieces = (samples + tile - 1) / tile, length = whole(net.sample);
    return over_clients(models * pieces, threads, [&](i64 number, Memory& memory) {
      i64 i = number / pieces, begin = number % pieces * tile, count = std::min(tile, samples - begin);
      Client client(net, count, memory, INPUT_GRADIENTS);
      std::vector<const real*> from(slots);
      for (size_t s = 0; s < slots; s++) from[s] = flat + i * flat_step + offsets[s];
      client.pack(client.weights, from.data());
      real* values = memory.take(16, 3 * count * length);  // of each sample: x, m, v
      real* center = memory.take(17, length);
      memset(values, 0, 3 * count * length * sizeof(real));
      memset(center, 0, length * sizeof(real));
      memcpy(center, mean, net.sample * sizeof(real));
      real* own = x + (i * samples + begin) * net.sample;
      std::vector<i64> active(count);
      for (i64 b = 0; b < count; b++) {
        memcpy(values + 3 * b * length, own + b * net.sample, net.sample * sizeof(real));
        active[b] = b;
      }
      auto leave = [&](i64 b, i64 done) {
        memcpy(own + b * net.sample, values + 3 * b * length, net.sample * sizeof(real));
        steps[i * samples + begin + b] = done;
      };
      i64 at = 0;
      for (; at < most && !active.empty(); at++) {
        i64 moving = active.size();
        for (i64 b = 0; b < moving; b++) {
          client.rows[b] = values + 3 * active[b] * length;
          client.labels[b] = labels[begin + active[b]];
          client.shares[b] = 1;
        }
        client.forward(client.weights, moving);
        std::vector<bool> stays(moving, true);
        if (at >= least)
          for (i64 b = 0; b < moving; b++) stays[b] = !(client.loss(b) < enough);
        real now = slope[at], low = floor[at];
        if (std::find(stays.begin(), stays.end(), true) == stays.end()) break;
        client.input_gradients(client.weights, moving, stays, [&](i64 b, const real* gradient) {
          real *place = values + 3 * active[b] * length, *m = place + length, *v = m + length;
          vec square = {};
          for (i64 j = 0; j < length; j += V) {
            vec apart = load(place + j) - load(center + j);
            square += apart * apart;
          }
          real norm = 0;
          for (int j = 0; j < V; j++) norm += square[j];
          norm = std::sqrt(norm);
          real share = norm > 0 ? (real)pull / norm : 0;
          for (i64 j = 0; j < net.sample; j++) {
            real g = gradient[j] + share * (place[j] - center[j]);
            m[j] += (real)0.1 * (g - m[j]);
            v[j] = (real)0.999 * v[j] + (real)0.001 * g * g;
            place[j] -= m[j] / (std::sqrt(v[j]) * now + low);
          }
        });
        i64 left = 0;
        for (i64 b = 0; b < moving; b++) {
          if (stays[b])
            active[left++] = active[b];
          else
            leave(active[b], at);
        }
        active.resize(left);
      }
      for (i64 b : active) leave(b, at);
    });
  } catch (...) {
    return 1;
  }
}

// The L1 distances of the softmax outputs of `models` to those in `expected` [K, L, M, classes], on samples
// x [K, L, M, D]; means over the M samples go to result [models, K, L].
// With `shares` [models, L] only the center with the least share-weighted sum is wanted: classes without a share are
// left out (0), and a center is left as soon as it is farther than the nearest so far; what it has is then a lower
// bound. start [models]: the center to begin with.
int distances(const i64* table, i64 layers, i64 models, i64 threads, const i64* offsets, const real* flat,
              i64 flat_step, const real* x, const real* expected, i64 centers, i64 groups, i64 samples,
              const real* shares, const i64* start, real* result) {
  try {
    Net net(table, layers);
    size_t slots = net.slots.size();
    i64 classes = net.outputs;
    return over_clients(models, threads, [&](i64 i, Memory& memory) {
      const i64 tile = shares ? 16 : 32;
      Client client(net, tile, memory, OUTPUTS);
      std::vector<const real*> from(slots);
      for (size_t s = 0; s < slots; s++) from[s] = flat + i * flat_step + offsets[s];
      client.pack(client.weights, from.data());
      const real* share = shares ? shares + i * groups : nullptr;
      std::vector<i64> order;  // samples of a center: one of each class, then the next of each class
      for (i64 m = 0; m < samples; m++)
        for (i64 k = 0; k < groups; k++)
          if (!share || share[k] > 0) order.push_back(k * samples + m);
      std::vector<real> own(classes);
      double best = INFINITY;
      for (i64 turn = 0; turn < centers; turn++) {
        i64 first = start ? start[i] : 0, j = turn == 0 ? first : turn <= first ? turn - 1 : turn;
        std::vector<double> sums(groups, 0.0);
        double total = 0;
        for (i64 at = 0; at < (i64)order.size() && !(total > best * 1.00001); at += tile) {
          i64 count = std::min<i64>(tile, order.size() - at);
          for (i64 b = 0; b < count; b++)
            client.rows[b] = x + (j * groups * samples + order[at + b]) * net.sample;
          client.forward(client.weights, count);
          for (i64 b = 0; b < count; b++) {
            const real *y = client.inputs.back()[b];
            const real *other = expected + (j * groups * samples + order[at + b]) * classes;
            real top = y[0], sum = 0, apart = 0;
            for (i64 c = 1; c < classes; c++) top = y[c] > top ? y[c] : top;
            for (i64 c = 0; c < classes; c++) sum += own[c] = std::exp(y[c] - top);
            for (i64 c = 0; c < classes; c++) apart += std::abs(own[c] / sum - other[c]);
            i64 k = order[at + b] / samples;
            sums[k] += apart;
            if (share) total += (double)share[k] * apart;
          }
        }
        if (share && total < best) best = total;
        for (i64 k = 0; k < groups; k++) result[(i * centers + j) * groups + k] = (real)(sums[k] / samples);
      }
    });
  } catch (...) {
    return 1;
  }
}
}
