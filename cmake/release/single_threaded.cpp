// This file is for modules that run with a glibc older than 2.32, the first that has this variable. The C++ library's
// headers read it, to count references without atomic operations while there is one thread; this says that there may be
// more.
extern "C" {
char __libc_single_threaded = 0;
}
