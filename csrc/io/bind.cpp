#include "io/bind.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/pool.h"

namespace mlora::io {
namespace {

namespace py = pybind11;
using Released = py::call_guard<py::gil_scoped_release>;

// A transfer as Python holds it: keeps the memory's owner, and does not end before the transfer does.
class Ticket {
 public:
  Ticket(std::shared_ptr<Transfer> transfer, py::object owner)
      : transfer_(std::move(transfer)), owner_(std::move(owner)) {}
  Ticket(Ticket&&) = default;
  ~Ticket() {
    if (transfer_ && !transfer_->done()) {
      const py::gil_scoped_release released;
      try {
        transfer_->wait();
      } catch (...) {  // nobody is left to hear of it
      }
    }
  }
  void wait() const { transfer_->wait(); }
  bool done() const { return transfer_->done(); }
  std::pair<double, double> span() const { return transfer_->span(); }

 private:
  std::shared_ptr<Transfer> transfer_;
  py::object owner_;
};

// std::thread::join must not hold the interpreter's lock.
struct Join {
  void operator()(Pool* pool) const {
    const py::gil_scoped_release released;
    delete pool;
  }
};

// Begins a read or a write, `Pool::read` or `Pool::write`.
template <auto begin>
Ticket transfer(Pool& pool, std::shared_ptr<File> file, int64_t offset, uintptr_t address, int64_t bytes,
                py::object owner) {
  char* memory = reinterpret_cast<char*>(address);
  return Ticket((pool.*begin)(std::move(file), offset, memory, bytes), std::move(owner));
}

}  // namespace

void bind(py::module_& module) {
  module.attr("ALIGN") = kAlign;
  module.attr("PIECE") = kPiece;

  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const IoError& found) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(found.code, found.what(), found.path).ptr());
    }
  });

  py::class_<File, std::shared_ptr<File>>(module, "File",
                                          "A file that is read and written in aligned pieces.")
      .def_static("open", &File::open, py::arg("path"), py::arg("direct") = true, Released())
      .def_static("create", &File::create, py::arg("path"), py::arg("direct") = true, Released())
      .def_static("scratch", &File::scratch, py::arg("folders"), py::arg("bytes"), py::arg("direct") = true,
                  Released())
      .def("sync", &File::sync, Released())
      .def_property_readonly("size", &File::size)
      .def_property_readonly("direct", &File::direct)
      .def_property_readonly("path", &File::path);

  py::class_<Ticket>(module, "Ticket", "A read or write under way.")
      .def("wait", &Ticket::wait, Released())
      .def_property_readonly("done", &Ticket::done)
      .def_property_readonly("span", &Ticket::span);

  py::class_<Pool, std::unique_ptr<Pool, Join>>(module, "Pool",
                                                "Threads that read and write without Python's lock.")
      .def(py::init(
               [](int threads, double rate) { return std::unique_ptr<Pool, Join>(new Pool(threads, rate)); }),
           py::arg("threads"), py::arg("rate") = 0.0)
      // file, offset, address, bytes, owner of the memory
      .def("read", &transfer<&Pool::read>, py::keep_alive<0, 1>())
      .def("write", &transfer<&Pool::write>, py::keep_alive<0, 1>())
      .def_property_readonly("cpu_seconds", &Pool::cpu_seconds);
}

}  // namespace mlora::io
