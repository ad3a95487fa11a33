/* dsdoctor.overflow.measure._scan: one pass over the memory of a tensor into a row of eight int64 (see rows.py).

   Goes in: an address, a count, the kind of the elements. Comes out: the row, and whether there is a nan or an inf.
   Floating point never happens here: magnitudes are unsigned integers ("keys") whose order is that of the absolute
   values, so a nan hides nothing and there are no flags, no flush to zero and no rounding. */

#if !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030A0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* The compiler makes each kernel for several instruction sets; the loader picks when the module is loaded. */
#if !defined(__x86_64__) || !defined(__GLIBC__) || !defined(__GNUC__)
#define CLONES
#elif defined(__clang__) && __clang_major__ >= 14
#define CLONES __attribute__((target_clones("avx512bw", "avx2", "default")))
#elif !defined(__clang__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#elif !defined(__clang__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

/* Torch promises no alignment for memory that came from elsewhere (numpy, frombuffer). */
#if defined(__GNUC__)
#define ANYWHERE __attribute__((aligned(1), may_alias))
#else
#define ANYWHERE
#endif
typedef uint8_t ANYWHERE any8;
typedef uint16_t ANYWHERE any16;
typedef uint32_t ANYWHERE any32;
typedef uint64_t ANYWHERE any64;

/* Small enough that the second look at a block comes from the first-level cache. */
#define BLOCK_BYTES 8192
#define RELEASE_GIL_BYTES (1 << 20)
#define NONE INT64_MAX

enum { NANS, POSINF, NEGINF, ZEROS, SUBNORMAL, ABSMAX, ABSMIN, MINNZ, COLUMNS };

typedef struct {
    size_t inner; /* elements that lie side by side */
    size_t count; /* how many such runs */
    size_t pitch; /* elements from the start of a run to the start of the next */
} Span;

#define PLAIN(v, U, SIGN) ((U)((v) & (U) ~(SIGN)))
#define FNUZ(v, U, SIGN) ((U)((v) == (SIGN) ? (SIGN) : ((v) & (U) ~(SIGN)))) /* "-0" is the one nan */
#define UNSIGNED(v, U, SIGN) (v)

/* Ask for the next block while this one is read: an eighth faster on what is not in a cache. Past the end it does nothing. */
#if defined(__GNUC__)
#define FETCH(next)                                                                                                    \
    for (size_t line = 0; line < BLOCK_BYTES; line += 64)                                                              \
        __builtin_prefetch((next) + line)
#else
#define FETCH(next) (void)0
#endif

/* LIMIT: the first key that is not finite. INF: the key of inf, 0 where the format has none. NORMAL: the smallest
   normal key. ZERO: 1, or 0 for the format without a zero (its key 0 is a number like any other). COUNT holds a block. */
#define KIND(NAME, U, LOAD, COUNT, KEY, SIGN, LIMIT, INF, NORMAL, ZERO)                                                \
    CLONES static void NAME(const char *data, Span span, int64_t *row)                                                 \
    {                                                                                                                  \
        for (size_t run = 0; run < span.count; run++) {                                                                \
            const LOAD *x = (const LOAD *)data + run * span.pitch;                                                     \
            size_t left = span.inner;                                                                                  \
            while (left) {                                                                                             \
                size_t n = left < BLOCK_BYTES / sizeof(U) ? left : BLOCK_BYTES / sizeof(U);                            \
                if (left > n)                                                                                          \
                    FETCH((const char *)x + BLOCK_BYTES);                                                              \
                U high = 0, low = (U)-1;                                                                               \
                for (size_t i = 0; i < n; i++) {                                                                       \
                    U key = KEY(x[i], U, SIGN);                                                                        \
                    high = key > high ? key : high;                                                                    \
                    low = key < low ? key : low;                                                                       \
                }                                                                                                      \
                if (high >= (LIMIT)) {                                                                                 \
                    U top = 0; /* finite keys wrap to the largest */                                                   \
                    COUNT bad = 0, plus = 0, minus = 0;                                                                \
                    for (size_t i = 0; i < n; i++) {                                                                   \
                        U key = KEY(x[i], U, SIGN), over = (U)(key - (LIMIT));                                         \
                        top = over > top ? over : top;                                                                 \
                        bad += key >= (LIMIT);                                                                         \
                        plus += x[i] == (U)(INF);                                                                      \
                        minus += x[i] == (U)((INF) | (SIGN));                                                          \
                    }                                                                                                  \
                    if (!(INF))                                                                                        \
                        plus = minus = 0;                                                                              \
                    row[NANS] += (int64_t)bad - (int64_t)plus - (int64_t)minus;                                        \
                    row[POSINF] += (int64_t)plus;                                                                      \
                    row[NEGINF] += (int64_t)minus;                                                                     \
                    high = (U)(top + (LIMIT));                                                                         \
                }                                                                                                      \
                U least = (U)(low - (ZERO));                                                                           \
                if ((NORMAL) && low < (NORMAL))   {                                                                    \
                    COUNT zeros = 0, below = 0;                                                                        \
                    least = (U)-1;                                                                                     \
                    for (size_t i = 0; i < n; i++) {                                                                   \
                        U key = KEY(x[i], U, SIGN), less = (U)(key - (ZERO)); /* zero wraps to the largest */          \
                        least = less < least ? less : least;                                                           \
                        zeros += key == 0;                                                                             \
                        below += key < (NORMAL);                                                                       \
                    }                                                                                                  \
                    row[ZEROS] += (int64_t)zeros;                                                                      \
                    row[SUBNORMAL] += (int64_t)below - (int64_t)zeros;                                                 \
                }                                                                                                      \
                if (low < (LIMIT)) {                                                                                   \
                    row[ABSMAX] = (int64_t)high > row[ABSMAX] ? (int64_t)high : row[ABSMAX];                           \
                    row[ABSMIN] = (int64_t)low < row[ABSMIN] ? (int64_t)low : row[ABSMIN];                             \
                }                                                                                                      \
                if (least < (U)((LIMIT) - (ZERO))) {                                                                   \
                    int64_t some = (int64_t)least + (ZERO);                                                            \
                    row[MINNZ] = some < row[MINNZ] ? some : row[MINNZ];                                                \
                }                                                                                                      \
                x += n;                                                                                                \
                left -= n;                                                                                             \
            }                                                                                                          \
        }                                                                                                              \
    }

KIND(float16, uint16_t, any16, uint16_t, PLAIN, 0x8000u, 0x7c00u, 0x7c00u, 0x0400u, 1)
KIND(bfloat16, uint16_t, any16, uint16_t, PLAIN, 0x8000u, 0x7f80u, 0x7f80u, 0x0080u, 1)
KIND(float32, uint32_t, any32, uint32_t, PLAIN, 0x80000000u, 0x7f800000u, 0x7f800000u, 0x00800000u, 1)
KIND(float64, uint64_t, any64, uint64_t, PLAIN, 0x8000000000000000u, 0x7ff0000000000000u, 0x7ff0000000000000u,
     0x0010000000000000u, 1)
KIND(float8_e4m3fn, uint8_t, any8, uint16_t, PLAIN, 0x80u, 0x7fu, 0u, 0x08u, 1)
KIND(float8_e5m2, uint8_t, any8, uint16_t, PLAIN, 0x80u, 0x7cu, 0x7cu, 0x04u, 1)
KIND(float8_e4m3fnuz, uint8_t, any8, uint16_t, FNUZ, 0x80u, 0x80u, 0u, 0x08u, 1)
KIND(float8_e5m2fnuz, uint8_t, any8, uint16_t, FNUZ, 0x80u, 0x80u, 0u, 0x04u, 1)
KIND(float8_e8m0fnu, uint8_t, any8, uint16_t, UNSIGNED, 0x00u, 0xffu, 0u, 0u, 0)

/* In the order of FORMATS in frames/dtypes.py. */
static const struct {
    void (*scan)(const char *, Span, int64_t *);
    size_t bytes;
} KINDS[] = {
    {float16, 2},     {bfloat16, 2},        {float32, 4},         {float64, 8},        {float8_e4m3fn, 1},
    {float8_e5m2, 1}, {float8_e4m3fnuz, 1}, {float8_e5m2fnuz, 1}, {float8_e8m0fnu, 1},
};

static void blank(int64_t *row)
{
    for (int i = 0; i < COLUMNS; i++)
        row[i] = i < ABSMAX ? 0 : i == ABSMAX ? -1 : NONE;
}

/* Scan with or without the interpreter's lock; returns True, False or an error. */
static PyObject *measure(const char *data, Span span, size_t kind, int64_t *row)
{
    if (kind >= sizeof KINDS / sizeof *KINDS || !row || (!data && span.inner && span.count)) {
        PyErr_SetString(PyExc_ValueError, "no memory to scan, no row to write or an unknown kind of elements");
        return NULL;
    }
    if (span.inner * span.count * KINDS[kind].bytes > RELEASE_GIL_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        KINDS[kind].scan(data, span, row);
        Py_END_ALLOW_THREADS
    } else {
        KINDS[kind].scan(data, span, row);
    }
    return PyBool_FromLong(row[NANS] || row[POSINF] || row[NEGINF]);
}

/* scan(data, numel, kind, row) -> bool: overwrite the row. */
static PyObject *scan(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "scan(data, numel, kind, row)");
        return NULL;
    }
    const char *data = PyLong_AsVoidPtr(args[0]);
    Span span = {PyLong_AsSize_t(args[1]), 1, 0};
    size_t kind = PyLong_AsSize_t(args[2]);
    int64_t fresh[COLUMNS], *row = PyLong_AsVoidPtr(args[3]);
    if (PyErr_Occurred())
        return NULL;
    blank(fresh);
    PyObject *bad = measure(data, span, kind, row ? fresh : NULL);
    if (bad)
        memcpy(row, fresh, sizeof fresh);
    return bad;
}

/* scan_span(data, inner, count, pitch, factor, kind, row, merge) -> bool: runs of elements, each standing for factor
   equal ones; overwrite the row, or add to what it holds. */
static PyObject *scan_span(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 8) {
        PyErr_SetString(PyExc_TypeError, "scan_span(data, inner, count, pitch, factor, kind, row, merge)");
        return NULL;
    }
    const char *data = PyLong_AsVoidPtr(args[0]);
    Span span = {PyLong_AsSize_t(args[1]), PyLong_AsSize_t(args[2]), PyLong_AsSize_t(args[3])};
    int64_t factor = PyLong_AsLongLong(args[4]);
    size_t kind = PyLong_AsSize_t(args[5]);
    int64_t fresh[COLUMNS], *row = PyLong_AsVoidPtr(args[6]);
    int merge = PyObject_IsTrue(args[7]);
    if (PyErr_Occurred())
        return NULL;
    blank(fresh);
    PyObject *bad = measure(data, span, kind, row ? fresh : NULL);
    if (!bad)
        return NULL;
    if (!merge)
        blank(row);
    for (int i = NANS; i < ABSMAX; i++)
        row[i] += fresh[i] * factor;
    row[ABSMAX] = fresh[ABSMAX] > row[ABSMAX] ? fresh[ABSMAX] : row[ABSMAX];
    for (int i = ABSMIN; i < COLUMNS; i++)
        row[i] = fresh[i] < row[i] ? fresh[i] : row[i];
    return bad;
}

static PyMethodDef METHODS[] = {
    {"scan", (PyCFunction)(void (*)(void))scan, METH_FASTCALL, "scan(data, numel, kind, row) -> bool"},
    {"scan_span", (PyCFunction)(void (*)(void))scan_span, METH_FASTCALL,
     "scan_span(data, inner, count, pitch, factor, kind, row, merge) -> bool"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {
#if defined(Py_GIL_DISABLED)
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef MODULE = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_scan",
    .m_doc = "One pass over the memory of a tensor.",
    .m_size = 0,
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__scan(void)
{
    return PyModuleDef_Init(&MODULE);
}
