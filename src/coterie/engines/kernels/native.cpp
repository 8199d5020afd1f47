// Training of plain networks on a CPU, one client after another, several clients at a time by threads.
//
// A network is a table of layers: first those over pictures (convolution, ReLU, pooling, closed by Flatten), sample
// by sample, then those over vectors (linear, ReLU), the whole batch at once. Everything a client needs stays in the
// cache of the core that trains it: weights are laid out with rows of whole vectors (the rest is zero and stays zero),
// samples are read where they lie, and the gradient of a dense layer goes from registers straight into the momentum and
// the weights. Plain C++ with the vector extensions of GCC and Clang; no library is called.
//
// For pseudo data one model meets many samples, and no weight changes: there a vector holds one number of V samples
// (`Lanes`), so that convolutions need no patches and pooling no shuffles.

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

// V rows of V numbers become V columns: each round deals two halves like cards.
static inline void turn(vec* v) {
#pragma GCC unroll 4
  for (int round = 1; round < V; round *= 2) {
    vec dealt[V];
#pragma GCC unroll 8
    for (int i = 0; i < V / 2; i++) {
      dealt[2 * i] = PICK(v[i], v[i + V / 2], LOW);
      dealt[2 * i + 1] = PICK(v[i], v[i + V / 2], HIGH);
    }
#pragma GCC unroll 16
    for (int i = 0; i < V; i++) v[i] = dealt[i];
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
  // Unrolled, or the sums would leave their registers.
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
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
    auto there = [=](i64 i, i64 n, vec v) { result(m + i, n, v); };
    outer(std::min<i64>(MR, rows - m), columns, depth, a + m * down, down, along, b, there);
  }
}

// ---- the network ----

enum Kind { LINEAR = 0, CONV = 1, RELU = 2, MAX_POOL = 3, FLATTEN = 4, MEAN_POOL = 5 };

struct Layer {
  i64 kind;
  i64 in_channels, in_height, in_width;     // of a vector: its length, 1, 1
  i64 out_channels, out_height, out_width;
  i64 high, wide, down, right, pad_y, pad_x;  // of a kernel
  i64 weight, bias;                          // places among the parameters; -1: none
};
constexpr int FIELDS = sizeof(Layer) / sizeof(i64);

static inline real share(const Layer& l) { return (real)1 / (l.high * l.wide); }  // of a pixel in the mean of a pool

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
        } else if (l.kind == FLATTEN) {
          out[i] = kept, kept += whole(l.out_channels);
        } else {
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

// The same for the rows of a matrix, without a pull or a correction, and without asking for them at each number.
template <bool Momentum> struct Descent {
  real *weights, *speed;
  i64 row;  // length
  real lr, momentum, decay;

  Descent(const Step& step, i64 first, i64 row)
      : weights(step.weights + first), speed(Momentum ? step.speed + first : nullptr), row(row), lr(step.lr),
        momentum(step.momentum), decay(step.decay) {}

  void operator()(i64 m, i64 n, vec g) const {
    real* here = weights + m * row + n;
    vec w = load(here);
    g += decay * w;
    if (Momentum) {
      real* fast = speed + m * row + n;
      g += momentum * load(fast);
      store(fast, g);
    }
    store(here, w - lr * g);
  }
};

// ---- one client ----

struct Client {
  const Net& net;
  i64 batch;  // most samples at a time
  real *weights, *speed, *gradient, *anchor, *extra, *inner_weights;
  real *kept, *patches, *framed, *one, *other, *vectors, *laid, *deltas, *sum;
  std::vector<const real*> rows;                 // samples as they lie
  std::vector<std::vector<const real*>> inputs;  // of each vector layer, by sample
  std::vector<i64> labels;
  std::vector<real> shares;  // of each sample in the loss

  Client(const Net& net, i64 batch, Memory& memory, bool training) : net(net), batch(batch) {
    i64 p = net.size, vector_layers = (i64)net.layers.size() - net.split;
    weights = memory.take(0, p);
    memset(weights, 0, p * sizeof(real));
    kept = memory.take(1, net.kept * batch);
    patches = memory.take(2, net.patches);
    framed = memory.take(14, net.frame);
    one = memory.take(3, net.largest);
    vectors = memory.take(5, vector_layers * batch * net.width);
    for (i64 b = 0; net.split && b < batch; b++) {  // dense layers read whole vectors, and picture layers no padding
      i64 length = net.layers[net.split - 1].out_channels;
      memset(flattened(b) + length, 0, (whole(length) - length) * sizeof(real));
    }
    if (!net.split && net.sample % V) {  // samples with a rest are laid out in whole vectors
      laid = memory.take(13, batch * whole(net.sample));
      memset(laid, 0, batch * whole(net.sample) * sizeof(real));
    }
    if (training) {
      other = memory.take(4, net.largest);
      deltas = memory.take(6, 2 * batch * net.width);
      memset(deltas, 0, 2 * batch * net.width * sizeof(real));
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
    real* mine = kept + b * net.kept;
    const real* x = rows[b];
    bool is_sample = true;  // planes of a sample have no padding
    for (i64 i = 0; i < net.split; i++) {
      const Layer& l = net.layers[i];
      real* to = mine + net.out[i];
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
      } else if (l.kind == MAX_POOL) {
        pool<false>(l, x, plane, to, next);
      } else if (l.kind == MEAN_POOL) {
        pool<true>(l, x, plane, to, next);
      } else {
        for (i64 c = 0; c < l.in_channels; c++)
          memcpy(to + c * l.in_height * l.in_width, x + c * plane, l.in_height * l.in_width * sizeof(real));
      }
      x = to;
      is_sample = false;
    }
  }

  template <bool Mean> static void pool(const Layer& l, const real* x, i64 plane, real* to, i64 next) {
    auto both = [](vec a, vec b) { return Mean ? a + b : most(a, b); };
    for (i64 c = 0; c < l.in_channels; c++)
      for (i64 y = 0; y < l.out_height; y++) {
        const real* from = x + c * plane + y * l.high * l.in_width;
        real* row = to + c * next + y * l.out_width;
        if (l.high == 2) {  // in whole vectors: what goes beyond a row is written again by the next one
          for (i64 i = 0; i < l.out_width; i += V) {
            vec a = load(from + 2 * i), b = load(from + 2 * i + V);
            const real* below = from + l.in_width;
            vec c = load(below + 2 * i), d = load(below + 2 * i + V);
            vec e = both(PICK(a, b, EVEN), PICK(a, b, ODD)), f = both(PICK(c, d, EVEN), PICK(c, d, ODD));
            store(row + i, Mean ? both(e, f) * share(l) : both(e, f));
          }
          continue;
        }
        for (i64 i = 0; i < l.out_width; i++) {
          real found = Mean ? 0 : from[i * l.wide];
          for (i64 ky = 0; ky < l.high; ky++)
            for (i64 kx = 0; kx < l.wide; kx++) {
              real v = from[ky * l.in_width + i * l.wide + kx];
              found = Mean ? found + v : std::max(found, v);
            }
          row[i] = Mean ? found * share(l) : found;
        }
      }
  }

  // Each pixel of a pool gets its share of the gradient. In whole vectors, as in `max_pool_back`.
  static void mean_pool_back(const Layer& l, i64 plane, const real* delta, i64 next, real* below) {
    memset(below, 0, l.in_channels * plane * sizeof(real));
    for (i64 c = 0; c < l.in_channels; c++)
      for (i64 y = 0; y < l.out_height; y++) {
        const real* from = delta + c * next + y * l.out_width;
        real* to = below + c * plane + y * l.high * l.in_width;
        if (l.high == 2) {
          for (i64 i = (l.out_width - 1) / V * V; i >= 0; i -= V) {
            vec d = only(load(from + i), lanes(0, l.out_width - i)) * share(l);
            for (real* row : {to + 2 * i, to + l.in_width + 2 * i})
              store(row, PICK(d, d, LOW)), store(row + V, PICK(d, d, HIGH));
          }
          continue;
        }
        for (i64 ky = 0; ky < l.high; ky++)
          for (i64 i = 0; i < l.out_width; i++)
            for (i64 kx = 0; kx < l.wide; kx++) to[ky * l.in_width + i * l.wide + kx] = from[i] * share(l);
      }
  }

  // Of equal values the first one gets the gradient.
  static void max_pool_back(const Layer& l, const real* x, i64 plane, const real* top,
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
    for (i64 b = 0; net.split && b < count; b++) picture(w, b);
    forward_vectors(w, count);
  }

  real* flattened(i64 b) const { return kept + b * net.kept + net.out[net.split - 1]; }

  // The layers after the pictures.
  void forward_vectors(const real* w, i64 count) {
    i64 layers = net.layers.size();
    if (net.split) {
      for (i64 b = 0; b < count; b++) inputs[0][b] = flattened(b);
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

  // The gradient of the mean loss of the samples in hand at `w`, given to `step` as it comes.
  void backward(const real* w, i64 count, const Step& step) {
    i64 layers = net.layers.size(), classes = net.outputs;
    real *delta = deltas, *below = deltas + batch * net.width;
    for (i64 b = 0; b < count; b++) {
      const real* y = inputs.back()[b];
      real* d = delta + b * net.width;
      real top = y[0], total = 0;
      for (i64 j = 1; j < classes; j++) top = y[j] > top ? y[j] : top;
      for (i64 j = 0; j < classes; j++) total += d[j] = std::exp(y[j] - top);
      real share = shares[b] / total;
      for (i64 j = 0; j < classes; j++) d[j] *= share;
      d[labels[b]] -= shares[b];
      for (i64 j = classes; j < whole(classes); j++) d[j] = 0;
    }
    for (i64 i = layers - 1; i >= net.split && i >= net.first; i--) {
      const Layer& l = net.layers[i];
      if (l.kind == RELU) {
        for (i64 b = 0; b < count; b++) {
          const real* y = inputs[i - net.split + 1][b];
          real* d = delta + b * net.width;
          for (i64 j = 0; j < whole(l.in_channels); j++) d[j] = y[j] <= 0 ? 0 : d[j];
        }
        continue;
      }
      const Slot& slot = net.slots[l.weight];
      i64 row = slot.step(), width = net.width;
      if (i > net.first) {
        outer(count, row, l.out_channels, delta, width, 1, Strided{w + slot.at, row},
              [=](i64 m, i64 n, vec v) { store(below + m * width + n, v); });
      }
      Scattered x{inputs[i - net.split].data()};
      if (step.gradient || step.anchor || step.extra) {
        outer_by_rows(l.out_channels, row, count, delta, 1, width, x,
                      [=, &step](i64 m, i64 n, vec v) { step.at(slot.at + m * row + n, v); });
      } else if (step.speed) {
        outer_by_rows(l.out_channels, row, count, delta, 1, width, x, Descent<true>(step, slot.at, row));
      } else {
        outer_by_rows(l.out_channels, row, count, delta, 1, width, x, Descent<false>(step, slot.at, row));
      }
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
    real* mine = kept + b * net.kept;
    real *now = one, *below = other;
    for (i64 i = net.split - 1; i >= net.first; i--) {
      const Layer& l = net.layers[i];
      const real* x = i ? mine + net.out[i - 1] : rows[b];
      i64 plane = came(l, i == 0), next = Net::plane(l.out_height, l.out_width);
      if (l.kind == FLATTEN) {
        for (i64 c = 0; c < l.in_channels; c++) {
          memcpy(now + c * plane, delta + c * l.in_height * l.in_width, l.in_height * l.in_width * sizeof(real));
          for (i64 j = l.in_height * l.in_width; j < plane; j++) now[c * plane + j] = 0;
        }
      } else if (l.kind == RELU) {
        const real* y = mine + net.out[i];
        for (i64 j = 0; j < l.in_channels * next; j++) now[j] = y[j] <= 0 ? 0 : now[j];
      } else if (l.kind == MAX_POOL) {
        max_pool_back(l, x, plane, mine + net.out[i], now, next, below);
        std::swap(now, below);
      } else if (l.kind == MEAN_POOL) {
        mean_pool_back(l, plane, now, next, below);
        std::swap(now, below);
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

// ---- one model, V samples side by side ----

// A convolution without border: sums(o, y, x) = sum over c, ky, kx of w[c, ky, kx, o] * in[c, y + ky, x + kx].
struct Window {
  const real* in;  // [channels, height, width] vectors
  i64 channels, height, width;
  const real* w;  // [c, ky, kx, outs]
  i64 outs, high, wide, down, right;
  i64 top, bottom, left, end;  // the rows from `top` to before `bottom` and columns from `left` to before `end` that are
                               // not zero: the rest is left out
};

template <int O, int X, class Result>
static inline void window_tile(const Window& l, i64 o, i64 y, i64 x, Result& result) {
  vec acc[O][X] = {};
  i64 first_row = std::max<i64>(0, l.top - y * l.down), last_row = std::min(l.high, l.bottom - y * l.down);
  i64 first = std::max<i64>(0, l.left - (x + X - 1) * l.right), last = std::min(l.wide, l.end - x * l.right);
  for (i64 c = 0; c < l.channels; c++)
    for (i64 ky = first_row; ky < last_row; ky++) {
      const real* row = l.in + ((c * l.height + y * l.down + ky) * l.width + x * l.right + first) * V;
      const real* kernel = l.w + ((c * l.high + ky) * l.wide + first) * l.outs + o;
      for (i64 kx = first; kx < last; kx++, kernel += l.outs, row += V) {
        vec r[X];
#pragma GCC unroll 8
        for (int j = 0; j < X; j++) {
          r[j] = load(row + j * l.right * V);
          HELD(r[j]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < O; i++) {
          vec weight = all(kernel[i]);
          HELD(weight);
#pragma GCC unroll 8
          for (int j = 0; j < X; j++) acc[i][j] += weight * r[j];
        }
      }
    }
  for (int i = 0; i < O; i++)
    for (int j = 0; j < X; j++) result(o + i, y, x + j, acc[i][j]);
}

template <int O, class Result>
static inline void window_row(const Window& l, i64 o, i64 y, i64 columns, Result& result) {
  constexpr int X = O < 4 ? 2 * NR : NR;  // with few weights more places, so that sums do not wait for each other
  i64 x = 0;
  for (; x + X <= columns; x += X) window_tile<O, X>(l, o, y, x, result);
  if (X > NR && x + NR <= columns) window_tile<O, NR>(l, o, y, x, result), x += NR;
  for (; x < columns; x++) window_tile<O, 1>(l, o, y, x, result);
}

// after(y): row y of all channels is there, and still in the cache.
template <class Result, class After>
static void windows(const Window& l, i64 rows, i64 columns, Result result, After after) {
  for (i64 y = 0; y < rows; y++) {
    i64 o = 0;
    for (; o + MR <= l.outs; o += MR) window_row<MR>(l, o, y, columns, result);
    if (MR > 4 && o + 4 <= l.outs) window_row<4>(l, o, y, columns, result), o += 4;
    if (o + 2 <= l.outs) window_row<2>(l, o, y, columns, result), o += 2;
    if (o < l.outs) window_row<1>(l, o, y, columns, result);
    after(y);
  }
}

// result(o) = sum over i of w[i, o] * in[i]; rows of w are `step` apart.
template <int O, class Result>
static inline void dense_tile(i64 o, i64 length, const real* w, i64 step, const real* in, Result& result) {
  vec acc[O] = {};
  const real* row = w + o;
  for (i64 i = 0; i < length; i++, row += step) {
    vec x = load(in + i * V);
#pragma GCC unroll 16
    for (int j = 0; j < O; j++) acc[j] += all(row[j]) * x;
  }
  for (int j = 0; j < O; j++) result(o + j, acc[j]);
}

template <class Result>
static void dense(i64 outs, i64 length, const real* w, i64 step, const real* in, Result result) {
  i64 o = 0;
  for (; o + 2 * MR <= outs; o += 2 * MR) dense_tile<2 * MR>(o, length, w, step, in, result);
  for (; o + 4 <= outs; o += 4) dense_tile<4>(o, length, w, step, in, result);
  for (; o < outs; o++) dense_tile<1>(o, length, w, step, in, result);
}

static inline vec root(vec v) {
  real all_of_them[V];
  memcpy(all_of_them, &v, sizeof v);
  for (int i = 0; i < V; i++) all_of_them[i] = std::sqrt(all_of_them[i]);
  memcpy(&v, all_of_them, sizeof v);
  return v;
}

struct Lanes {
  const Net& net;
  i64 count;  // layers
  real *x, *kept, *one, *other;
  real *weights;  // of each layer by input, then output: [I, O] or [I, high, wide, O]
  real *turned;   // for the way back: [O, I] or, with kernels turned round, [O, high, wide, I]
  real *frames;   // of each convolution: its input with a border of zeros
  real *around;   // of each convolution: the gradient of its output, with the zeros that the way back needs
  const real* flat = nullptr;
  const i64* offsets = nullptr;
  std::vector<i64> place;  // of a layer's output in `kept`; -1: that of the layer before it
  std::vector<i64> weight_at, frame_at, around_at;
  i64 around_size = 0;
  bool can_go_back = false;

  static i64 inside(const Layer& l) { return l.in_channels * l.in_height * l.in_width; }
  static i64 outside(const Layer& l) { return l.out_channels * l.out_height * l.out_width; }
  static i64 frame_height(const Layer& l) { return l.in_height + 2 * l.pad_y; }
  static i64 frame_width(const Layer& l) { return l.in_width + 2 * l.pad_x; }
  static i64 around_height(const Layer& l) { return l.in_height + l.high - 1; }
  static i64 around_width(const Layer& l) { return l.in_width + l.wide - 1; }
  static bool has_border(const Layer& l) { return l.pad_y || l.pad_x; }
  bool is(i64 i, Kind kind) const { return i >= 0 && i < count && net.layers[i].kind == kind; }
  bool is_pool(i64 i) const { return is(i, MAX_POOL) || is(i, MEAN_POOL); }

  // Over the first `count` layers; its memory begins at `first`.
  Lanes(const Net& net, Memory& memory, i64 count, size_t first) : net(net), count(count) {
    i64 total = 0, largest = net.sample, all_frames = 0, all_weights = 0;
    for (i64 i = 0; i < count; i++) {
      const Layer& l = net.layers[i];
      bool same = i > 0 && (l.kind == FLATTEN || l.kind == RELU);
      place.push_back(same ? -1 : total);
      if (!same) total += outside(l);
      largest = std::max(largest, outside(l));
      weight_at.push_back(all_weights), frame_at.push_back(all_frames), around_at.push_back(around_size);
      if (l.weight >= 0) all_weights += net.slots[l.weight].rows * net.slots[l.weight].columns;
      if (l.kind != CONV) continue;
      if (has_border(l)) all_frames += l.in_channels * frame_height(l) * frame_width(l);
      around_size += l.out_channels * around_height(l) * around_width(l);
    }
    x = memory.take(first, net.sample * V);
    kept = memory.take(first + 1, total * V);
    one = memory.take(first + 2, largest * V);
    other = memory.take(first + 3, largest * V);
    weights = memory.take(first + 4, all_weights);
    turned = memory.take(first + 5, all_weights);
    frames = memory.take(first + 6, all_frames * V);
    around = memory.take(first + 7, around_size * V);
    memset(frames, 0, all_frames * V * sizeof(real));
  }

  void take(const i64* all_offsets, const real* model) {
    offsets = all_offsets, flat = model, can_go_back = false;
    for (i64 i = 0; i < count; i++) {
      const Layer& l = net.layers[i];
      if (l.weight < 0) continue;
      const Slot& s = net.slots[l.weight];
      const real* from = flat + offsets[l.weight];
      real* to = weights + weight_at[i];
      for (i64 o = 0; o < s.rows; o++)
        for (i64 k = 0; k < s.columns; k++) to[k * s.rows + o] = from[o * s.columns + k];
    }
  }

  void prepare_way_back() {
    if (can_go_back) return;
    can_go_back = true;
    memset(around, 0, around_size * V * sizeof(real));
    for (i64 i = 0; i < count; i++) {
      const Layer& l = net.layers[i];
      if (l.weight < 0) continue;
      i64 taps = l.kind == CONV ? l.high * l.wide : 1, ins = l.in_channels;
      const real* from = flat + offsets[l.weight];
      real* to = turned + weight_at[i];
      for (i64 o = 0; o < l.out_channels; o++)
        for (i64 c = 0; c < ins; c++)
          for (i64 k = 0; k < taps; k++) to[(o * taps + taps - 1 - k) * ins + c] = from[(o * ins + c) * taps + k];
    }
  }

  // Samples as they lie, one in each lane; lanes beyond `side` repeat the last.
  void put(const real* const* samples, i64 side) {
    i64 j = 0;
    for (; j + V <= net.sample; j += V) {
      vec some[V];
      for (i64 lane = 0; lane < V; lane++) some[lane] = load(samples[std::min(lane, side - 1)] + j);
      turn(some);
      for (i64 k = 0; k < V; k++) store(x + (j + k) * V, some[k]);
    }
    for (; j < net.sample; j++)
      for (i64 lane = 0; lane < V; lane++) x[j * V + lane] = samples[std::min(lane, side - 1)][j];
  }

  real* output(i64 i) const {  // of layer i; of -1: the samples
    while (i >= 0 && place[i] < 0) i--;
    return i < 0 ? x : kept + place[i] * V;
  }
  const real* bias(const Layer& l) const { return l.bias < 0 ? nullptr : flat + offsets[l.bias]; }

  const real* forward() {
    for (i64 i = 0; i < count; i++) {
      const Layer& l = net.layers[i];
      const real *in = output(i - 1), *shift = bias(l);
      real* out = output(i);
      if (l.kind == CONV) {
        i64 height = frame_height(l), width = frame_width(l);
        if (has_border(l)) {
          real* frame = frames + frame_at[i] * V;
          lay(in, l.in_channels, l.in_height, l.in_width, frame, l.pad_y, l.pad_x, 1, 1, height, width);
          in = frame;
        }
        Window window{in, l.in_channels, height, width, weights + weight_at[i], l.out_channels, l.high, l.wide,
                      l.down, l.right, l.pad_y, l.pad_y + l.in_height, l.pad_x, l.pad_x + l.in_width};
        bool clip = is(i + 1, RELU), pools = clip && is_pool(i + 2);  // done together, while a row is in the cache
        const Layer& next = net.layers[pools ? i + 2 : i];
        real* pooled = output(pools ? i + 2 : i);
        windows(window, l.out_height, l.out_width, [=](i64 o, i64 y, i64 x, vec v) {
          if (shift) v += shift[o];
          if (clip) v = most(v, vec{});
          store(out + ((o * l.out_height + y) * l.out_width + x) * V, v);
        }, [=](i64 y) {
          if (!pools || (y + 1) % next.high || y / next.high >= next.out_height) return;
          for (i64 c = 0; c < next.in_channels; c++) pool_row(next, c, y / next.high, out, pooled);
        });
        i += clip + pools;
      } else if (l.kind == LINEAR) {
        dense(l.out_channels, l.in_channels, weights + weight_at[i], l.out_channels, in,
              [=](i64 o, vec v) { store(out + o * V, shift ? v + shift[o] : v); });
      } else if (l.kind == RELU) {
        for (i64 j = 0; j < inside(l); j++) store(out + j * V, most(load(in + j * V), vec{}));
      } else if (is_pool(i)) {
        for (i64 c = 0; c < l.in_channels; c++)
          for (i64 y = 0; y < l.out_height; y++) pool_row(l, c, y, in, out);
      }
    }
    return output(count - 1);
  }

  // The picture layers of samples `b` to `b + side` of a client.
  void pictures(Client& client, i64 b, i64 side) {
    put(client.rows.data() + b, side);
    const real* found = forward();
    i64 j = 0, length = net.layers[net.split - 1].out_channels;
    for (; j + V <= length; j += V) {
      vec some[V];
      for (i64 k = 0; k < V; k++) some[k] = load(found + (j + k) * V);
      turn(some);
      for (i64 lane = 0; lane < side; lane++) store(client.flattened(b + lane) + j, some[lane]);
    }
    for (; j < length; j++)
      for (i64 lane = 0; lane < side; lane++) client.flattened(b + lane)[j] = found[j * V + lane];
  }

  static void pool_row(const Layer& l, i64 c, i64 y, const real* in, real* out) {
    const real* from = in + (c * l.in_height + y * l.high) * l.in_width * V;
    real* to = out + (c * l.out_height + y) * l.out_width * V;
    for (i64 i = 0; i < l.out_width; i++, from += l.wide * V, to += V) {
      vec top = load(from), sum = {};
      for (i64 ky = 0; ky < l.high; ky++)
        for (i64 kx = 0; kx < l.wide; kx++) {
          vec v = load(from + (ky * l.in_width + kx) * V);
          top = most(top, v), sum += v;
        }
      store(to, l.kind == MEAN_POOL ? sum * share(l) : top);
    }
  }

  // The gradient with respect to the samples, from that of the outputs, which is in `one` (and is written over).
  const real* backward() {
    prepare_way_back();
    real *now = one, *below = other;
    bool is_laid = false;  // the gradient lies in `around` already
    for (i64 i = count - 1; i >= 0; i--) {
      const Layer& l = net.layers[i];
      const real *in = output(i - 1), *out = output(i);
      real* to = below;
      if (l.kind == CONV) {
        i64 height = around_height(l), width = around_width(l);
        real* laid = around + around_at[i] * V;
        i64 top = l.high - 1 - l.pad_y, left = l.wide - 1 - l.pad_x;
        if (!is_laid)
          lay(now, l.out_channels, l.out_height, l.out_width, laid, top, left, l.down, l.right, height, width);
        is_laid = false;
        Window window{laid, l.out_channels, height, width, turned + weight_at[i], l.in_channels, l.high, l.wide, 1, 1,
                      top, top + (l.out_height - 1) * l.down + 1, left, left + (l.out_width - 1) * l.right + 1};
        windows(window, l.in_height, l.in_width, [=](i64 o, i64 y, i64 x, vec v) {
          store(to + ((o * l.in_height + y) * l.in_width + x) * V, v);
        }, [](i64) {});
        std::swap(now, below);
      } else if (l.kind == LINEAR) {
        dense(l.in_channels, l.out_channels, turned + weight_at[i], l.in_channels, now,
              [=](i64 o, vec v) { store(to + o * V, v); });
        std::swap(now, below);
      } else if (l.kind == RELU) {
        for (i64 j = 0; j < inside(l); j++) {
          vec d = load(now + j * V);
          store(now + j * V, load(out + j * V) <= vec{} ? vec{} : d);
        }
      } else if (is_pool(i)) {
        const Layer& conv = net.layers[i < 2 ? 0 : i - 2];
        // Through pooling and ReLU at once, straight to where the convolution needs the gradient.
        if (is(i - 1, RELU) && is(i - 2, CONV) && conv.down == 1 && conv.right == 1 && conv.pad_y < conv.high &&
            conv.pad_x < conv.wide) {
          real* laid = around + around_at[i - 2] * V;
          laid += ((conv.high - 1 - conv.pad_y) * around_width(conv) + conv.wide - 1 - conv.pad_x) * V;
          pool_back<true>(l, in, out, now, laid, around_height(conv), around_width(conv));
          is_laid = true;
          i--;
        } else {
          memset(below, 0, inside(l) * V * sizeof(real));
          pool_back<false>(l, in, out, now, below, l.in_height, l.in_width);
          std::swap(now, below);
        }
      }
    }
    return now;
  }

  // Of equal values of a maximum the first one gets the gradient. `to`: a picture of rows of `width`; Clip: back through
  // a ReLU too.
  template <bool Clip>
  static void pool_back(const Layer& l, const real* in, const real* out, const real* delta, real* to, i64 height,
                        i64 width) {
    for (i64 c = 0; c < l.in_channels; c++)
      for (i64 y = 0; y < l.out_height; y++) {
        const real* from = in + (c * l.in_height + y * l.high) * l.in_width * V;
        real* row = to + (c * height + y * l.high) * width * V;
        i64 at = (c * l.out_height + y) * l.out_width * V;
        for (i64 i = 0; i < l.out_width; i++, at += V, from += l.wide * V, row += l.wide * V) {
          vec d = load(delta + at);
          if (l.kind == MEAN_POOL) {
            d *= share(l);
            for (i64 ky = 0; ky < l.high; ky++)
              for (i64 kx = 0; kx < l.wide; kx++) {
                places mine = Clip ? (places)(load(from + (ky * l.in_width + kx) * V) > vec{}) : ~places{};
                store(row + (ky * width + kx) * V, only(d, mine));
              }
            continue;
          }
          vec best = load(out + at);
          places free = Clip ? (places)(best > vec{}) : ~places{};
          for (i64 ky = 0; ky < l.high; ky++)
            for (i64 kx = 0; kx < l.wide; kx++) {
              places mine = free & (load(from + (ky * l.in_width + kx) * V) == best);
              store(row + (ky * width + kx) * V, only(d, mine));
              free &= ~mine;
            }
        }
      }
  }

  // A picture in a larger one: its pixel (y, x) at (top + y * down, left + x * right), if that is inside.
  static void lay(const real* in, i64 channels, i64 rows, i64 columns, real* to, i64 top, i64 left, i64 down, i64 right,
                  i64 height, i64 width) {
    for (i64 c = 0; c < channels; c++)
      for (i64 y = 0; y < rows; y++) {
        i64 row = top + y * down;
        if (row < 0 || row >= height) continue;
        for (i64 i = 0; i < columns; i++) {
          i64 column = left + i * right;
          if (column < 0 || column >= width) continue;
          store(to + ((c * height + row) * width + column) * V, load(in + ((c * rows + y) * columns + i) * V));
        }
      }
  }
};

// Softmax of the outputs in one lane.
static inline void softmax(const real* outputs, i64 lane, i64 classes, real* to) {
  real top = outputs[lane], total = 0;
  for (i64 j = 1; j < classes; j++) top = std::max(top, outputs[j * V + lane]);
  for (i64 j = 0; j < classes; j++) total += to[j] = std::exp(outputs[j * V + lane] - top);
  for (i64 j = 0; j < classes; j++) to[j] /= total;
}

// Calls use(j, g) for each input j with the gradient, in each lane, of its sample's cross-entropy + pull * ||x - mean||.
// `labels` of the first `count` lanes; the others have the last label. `shares`: room for the classes.
template <class Use>
static void input_gradient(Lanes& lanes, const i64* labels, i64 count, const real* mean, double pull,
                           std::vector<real>& shares, Use use) {
  const i64 size = lanes.net.sample, classes = lanes.net.outputs;
  const real* y = lanes.forward();
  for (i64 lane = 0; lane < V; lane++) {
    i64 label = labels[std::min(lane, count - 1)];
    softmax(y, lane, classes, shares.data());
    for (i64 j = 0; j < classes; j++) lanes.one[j * V + lane] = shares[j] - (j == label);
  }
  const real* gradient = lanes.backward();
  vec length = {}, near = {};
  for (i64 j = 0; j < size; j++) {
    vec apart = load(lanes.x + j * V) - mean[j];
    length += apart * apart;
  }
  length = root(length);
  for (int lane = 0; lane < V; lane++) near[lane] = length[lane] > 0 ? (real)pull / length[lane] : 0;
  for (i64 j = 0; j < size; j++) use(j, load(gradient + j * V) + near * (load(lanes.x + j * V) - mean[j]));
}

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
      Client client(net, std::min(batch[i], sizes[i]), memory, true);
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
      Client client(net, batch, memory, true);
      std::vector<const real*> from(slots);
      std::vector<real*> to(slots);
      for (size_t s = 0; s < slots; s++) from[s] = params[s] + i * numel[s], to[s] = found[s] + i * numel[s];
      client.pack(client.weights, from.data());
      real total = 0;
      for (i64 b = 0; b < batch; b++) total += mask ? mask[i * batch + b] : 1;
      i64 used = 0;  // samples of weight 0 cost nothing
      for (i64 b = 0; b < batch; b++) {
        real weight = mask ? mask[i * batch + b] : 1;
        if (weight == 0) continue;
        client.rows[used] = x + i * x_step + b * net.sample;
        client.labels[used] = y[i * batch + b];
        client.shares[used++] = weight / (total > 1 ? total : 1);
      }
      if (!used) {
        for (size_t s = 0; s < slots; s++) std::fill(to[s], to[s] + numel[s], real(0));
        return;
      }
      client.forward(client.weights, used);
      Step collect{client.weights, nullptr, client.gradient, nullptr, nullptr, 0, 0, 0, 0};
      client.backward(client.weights, used, collect);
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
      Client client(net, std::min(tile, end - begin), memory, false);
      std::vector<const real*> from(slots);
      for (size_t s = 0; s < slots; s++) from[s] = flat + i * flat_step + offsets[s];
      client.pack(client.weights, from.data());
      Lanes lanes(net, memory, net.split, 20);  // over no layers, if there are no pictures
      lanes.take(offsets, flat + i * flat_step);
      for (i64 at = begin; at < end; at += tile) {
        i64 count = std::min(tile, end - at);
        for (i64 b = 0; b < count; b++) client.rows[b] = x + i * x_step + (at + b) * net.sample;
        // Pictures V at a time; fewer than half of V are faster one by one.
        for (i64 b = 0, side; net.split && b < count; b += side) {
          side = std::min<i64>(V, count - b);
          if (2 * side > V)
            lanes.pictures(client, b, side);
          else
            for (i64 j = b; j < b + side; j++) client.picture(client.weights, j);
        }
        client.forward_vectors(client.weights, count);
        for (i64 b = 0; b < count; b++)
          memcpy(result + (i * samples + at + b) * net.outputs, client.inputs.back()[b], net.outputs * sizeof(real));
      }
    });
  } catch (...) {
    return 1;
  }
}
// Moves samples x [models, samples, D] by Adam until their model classifies them as `labels` [samples]. The loss of a
// sample is its cross-entropy + pull * ||x - mean||. A step is m / (sqrt(v) * slope[t] + floor[t]), for `steps` steps.
// What becomes of a sample depends on no other sample.
int search(const i64* table, i64 layers, i64 models, i64 threads, const i64* offsets, const real* flat, i64 flat_step,
           i64 samples, real* x, const i64* labels, const real* mean, double pull, const real* slope,
           const real* floor, i64 steps) {
  try {
    Net net(table, layers);
    const i64 share = 4 * V, size = net.sample;  // share: samples of one piece of work
    i64 pieces = (samples + share - 1) / share;
    return over_clients(models * pieces, threads, [&](i64 number, Memory& memory) {
      i64 i = number / pieces, first = number % pieces * share, last = std::min(first + share, samples);
      Lanes lanes(net, memory, layers, 0);
      lanes.take(offsets, flat + i * flat_step);
      real *m = memory.take(8, size * V), *v = memory.take(9, size * V);
      std::vector<real> shares(net.outputs);
      for (i64 begin = first; begin < last; begin += V) {
        i64 count = std::min<i64>(V, last - begin);
        real* own = x + (i * samples + begin) * size;
        memset(m, 0, size * V * sizeof(real));
        memset(v, 0, size * V * sizeof(real));
        const real* mine[V];
        for (i64 lane = 0; lane < count; lane++) mine[lane] = own + lane * size;
        lanes.put(mine, count);
        for (i64 at = 0; at < steps; at++)
          input_gradient(lanes, labels + begin, count, mean, pull, shares, [&](i64 j, vec g) {
            vec now = load(lanes.x + j * V), speed = load(m + j * V), power = load(v + j * V);
            speed += (real)0.1 * (g - speed);
            power = (real)0.999 * power + (real)0.001 * g * g;
            store(m + j * V, speed);
            store(v + j * V, power);
            store(lanes.x + j * V, now - speed / (root(power) * slope[at] + floor[at]));
          });
        for (i64 lane = 0; lane < count; lane++)
          for (i64 j = 0; j < size; j++) own[lane * size + j] = lanes.x[j * V + lane];
      }
    });
  } catch (...) {
    return 1;
  }
}

// Gradients [models, samples, D] of the losses of `search` with respect to the samples x, each of its own loss.
int input_gradients(const i64* table, i64 layers, i64 models, i64 threads, const i64* offsets, const real* flat,
                    i64 flat_step, i64 samples, const real* x, const i64* labels, const real* mean, double pull,
                    real* result) {
  try {
    Net net(table, layers);
    const i64 share = 4 * V, size = net.sample;  // share: samples of one piece of work
    i64 pieces = (samples + share - 1) / share;
    return over_clients(models * pieces, threads, [&](i64 number, Memory& memory) {
      i64 i = number / pieces, first = number % pieces * share, last = std::min(first + share, samples);
      Lanes lanes(net, memory, layers, 0);
      lanes.take(offsets, flat + i * flat_step);
      std::vector<real> shares(net.outputs);
      for (i64 begin = first; begin < last; begin += V) {
        i64 count = std::min<i64>(V, last - begin);
        const real* mine[V];
        for (i64 lane = 0; lane < count; lane++) mine[lane] = x + (i * samples + begin + lane) * size;
        lanes.put(mine, count);
        real* to = result + (i * samples + begin) * size;
        input_gradient(lanes, labels + begin, count, mean, pull, shares, [&](i64 j, vec g) {
          for (i64 lane = 0; lane < count; lane++) to[lane * size + j] = g[lane];
        });
      }
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
    i64 classes = net.outputs;
    return over_clients(models, threads, [&](i64 i, Memory& memory) {
      Lanes lanes(net, memory, layers, 0);
      lanes.take(offsets, flat + i * flat_step);
      const real* share = shares ? shares + i * groups : nullptr;
      std::vector<i64> mine;  // classes in hand
      for (i64 k = 0; k < groups; k++)
        if (!share || share[k] > 0) mine.push_back(k);
      std::vector<real> own(classes);
      double best = INFINITY;
      for (i64 turn = 0; turn < centers; turn++) {
        i64 first = start ? start[i] : 0, j = turn == 0 ? first : turn <= first ? turn - 1 : turn;
        std::vector<double> sums(groups, 0.0);
        std::vector<i64> done(groups, 0), order = mine;
        double total = 0;
        // With a margin: rounding must not decide.
        while (!order.empty() && !(total > best * 1.00001)) {
          i64 chosen[V], count = 0;
          // Two of each class to begin with, then the classes on which the two differ most: a center that is farther
          // shows it soon. In a class samples are taken in their order, so that its sum does not depend on any of this.
          i64 most = share && done[order[0]] == 0 ? 2 : samples;
          for (size_t n = 0; n < order.size() && count < V; n++)
            for (i64 u = 0, k = order[n]; u < most && count < V && done[k] < samples; u++)
              chosen[count++] = (j * groups + k) * samples + done[k]++;
          const real* these[V];
          for (i64 lane = 0; lane < count; lane++) these[lane] = x + chosen[lane] * net.sample;
          lanes.put(these, count);
          const real* y = lanes.forward();
          for (i64 lane = 0; lane < count; lane++) {
            const real* other = expected + chosen[lane] * classes;
            softmax(y, lane, classes, own.data());
            real apart = 0;
            for (i64 c = 0; c < classes; c++) apart += std::abs(own[c] - other[c]);
            i64 k = chosen[lane] / samples % groups;
            sums[k] += apart;
            if (share) total += (double)share[k] * apart;
          }
          order.erase(std::remove_if(order.begin(), order.end(), [&](i64 k) { return done[k] == samples; }), order.end());
          if (share)
            std::stable_sort(order.begin(), order.end(), [&](i64 k, i64 l) {  // classes not seen yet come first
              if (!done[k] || !done[l]) return !done[k] && done[l];
              return share[k] * sums[k] / done[k] > share[l] * sums[l] / done[l];
            });
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
