//! Network namespaces, the links of sandboxes, and the maps and programs that judge them.

use std::net::IpAddr;
use std::os::fd::{AsFd, IntoRawFd};
use std::path::Path;

use dsec_net::{Ends, Hook, Links};
use dsec_sys::BpfMap;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::raised;

type Pair = (String, String);
type Network = (String, u8);

fn ip(text: &str) -> PyResult<IpAddr> {
    text.parse().map_err(|_| PyValueError::new_err(text.to_owned()))
}

fn ends(pair: &Pair) -> PyResult<Ends> {
    Ok(Ends {
        v4: ip(&pair.0)?,
        v6: ip(&pair.1)?,
    })
}

#[pyfunction]
fn make_netns(py: Python<'_>) -> PyResult<i32> {
    Ok(py.detach(dsec_sys::make_netns).map_err(raised)?.into_raw_fd())
}

#[pyfunction]
fn this_netns(py: Python<'_>) -> PyResult<i32> {
    Ok(py.detach(dsec_sys::this_netns).map_err(raised)?.into_raw_fd())
}

#[pyfunction]
#[pyo3(signature = (netns, family, kind, protocol=0))]
fn socket_in(py: Python<'_>, netns: i32, family: i32, kind: i32, protocol: i32) -> PyResult<i32> {
    let made = py.detach(|| {
        let netns = dsec_sys::duplicate(netns)?;
        dsec_sys::socket_in(netns.as_fd(), family, kind, protocol)
    });
    Ok(made.map_err(raised)?.into_raw_fd())
}

/// Text written to a file of /proc as a thread in `netns` sees it; what it said before.
#[pyfunction]
fn exchange_in(py: Python<'_>, netns: i32, path: &str, text: Option<&str>) -> PyResult<String> {
    py.detach(|| {
        let netns = dsec_sys::duplicate(netns)?;
        dsec_sys::within(netns.as_fd(), || {
            let named = |e: std::io::Error| dsec_sys::Error::from_io("sysctl", Path::new(path), &e);
            let before = std::fs::read_to_string(path).map_err(named)?;
            if let Some(text) = text {
                std::fs::write(path, text).map_err(named)?;
            }
            Ok(before.trim_end().to_owned())
        })
    })
    .map_err(raised)
}

/// Runs a program in `netns` with text as its input; its status and what it said on its errors' end.
#[pyfunction]
fn run_in(py: Python<'_>, netns: i32, argv: Vec<String>, input: &str) -> PyResult<(i32, String)> {
    py.detach(|| {
        let netns = dsec_sys::duplicate(netns)?;
        dsec_sys::within(netns.as_fd(), || dsec_net::run(&argv, input))
    })
    .map_err(raised)
}

#[pyclass(frozen)]
struct PolicyHook(Hook);

#[pymethods]
impl PolicyHook {
    #[new]
    fn new(py: Python<'_>, pins: &str) -> PyResult<Self> {
        py.detach(|| Hook::open(Path::new(pins))).map(Self).map_err(raised)
    }

    fn events_fd(&self) -> i32 {
        self.0.events_fd()
    }

    fn drain<'py>(&self, py: Python<'py>, most: usize) -> Vec<Bound<'py, PyBytes>> {
        let found = py.detach(|| self.0.drain(most));
        found.iter().map(|event| PyBytes::new(py, event)).collect()
    }
}

#[pyclass(frozen)]
struct RouterLinks(Links);

#[pymethods]
impl RouterLinks {
    /// Takes copies of both descriptors.
    #[new]
    fn new(py: Python<'_>, host: i32, router: i32) -> PyResult<Self> {
        py.detach(|| Links::open(dsec_sys::duplicate(host)?, dsec_sys::duplicate(router)?))
            .map(Self)
            .map_err(raised)
    }

    fn uplink(&self, py: Python<'_>, name: &str, gateway: Pair, mtu: u32, relay_mark: u32) -> PyResult<()> {
        let gateway = ends(&gateway)?;
        py.detach(|| self.0.uplink(name, gateway, mtu, relay_mark))
            .map_err(raised)
    }

    fn behind(&self, py: Python<'_>, name: &str, v4: Network, v6: Network) -> PyResult<()> {
        let (v4, v6) = ((ip(&v4.0)?, v4.1), (ip(&v6.0)?, v6.1));
        py.detach(|| self.0.behind(name, v4, v6)).map_err(raised)
    }

    #[pyo3(signature = (name, sandbox, own, gateway, mtu, hook))]
    #[allow(clippy::too_many_arguments)]
    fn link(
        &self,
        py: Python<'_>,
        name: &str,
        sandbox: i32,
        own: Pair,
        gateway: Pair,
        mtu: u32,
        hook: &PolicyHook,
    ) -> PyResult<u32> {
        let (own, gateway) = (ends(&own)?, ends(&gateway)?);
        py.detach(|| {
            let sandbox = dsec_sys::duplicate(sandbox)?;
            self.0.link(name, sandbox.as_fd(), own, gateway, mtu, &hook.0)
        })
        .map_err(raised)
    }

    fn unlink(&self, py: Python<'_>, names: Vec<String>) -> PyResult<()> {
        py.detach(|| self.0.unlink(&names)).map_err(raised)
    }

    fn cut_uplink(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        py.detach(|| self.0.cut_uplink(name)).map_err(raised)
    }

    fn has_uplink(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        py.detach(|| self.0.has_uplink(name)).map_err(raised)
    }

    fn index(&self, py: Python<'_>, name: &str) -> PyResult<u32> {
        py.detach(|| self.0.index(name)).map_err(raised)
    }
}

/// A pinned map: bytes to bytes.
#[pyclass(frozen)]
struct PinnedMap(BpfMap);

#[pymethods]
impl PinnedMap {
    #[new]
    fn new(py: Python<'_>, path: &str) -> PyResult<Self> {
        py.detach(|| BpfMap::pinned(path)).map(Self).map_err(raised)
    }

    fn sizes(&self) -> (usize, usize) {
        self.0.sizes()
    }

    fn put(&self, py: Python<'_>, key: &[u8], value: &[u8]) -> PyResult<()> {
        py.detach(|| self.0.put(key, value)).map_err(raised)
    }

    fn get<'py>(&self, py: Python<'py>, key: &[u8]) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let found = py.detach(|| self.0.get(key)).map_err(raised)?;
        Ok(found.map(|value| PyBytes::new(py, &value)))
    }

    fn remove(&self, py: Python<'_>, key: &[u8]) -> PyResult<bool> {
        py.detach(|| self.0.remove(key)).map_err(raised)
    }

    #[allow(clippy::type_complexity)]
    fn entries<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)>> {
        let found = py.detach(|| self.0.entries()).map_err(raised)?;
        Ok(found
            .iter()
            .map(|(key, value)| (PyBytes::new(py, key), PyBytes::new(py, value)))
            .collect())
    }
}

pub fn export(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(make_netns, module)?)?;
    module.add_function(wrap_pyfunction!(this_netns, module)?)?;
    module.add_function(wrap_pyfunction!(socket_in, module)?)?;
    module.add_function(wrap_pyfunction!(exchange_in, module)?)?;
    module.add_function(wrap_pyfunction!(run_in, module)?)?;
    module.add_class::<PolicyHook>()?;
    module.add_class::<RouterLinks>()?;
    module.add_class::<PinnedMap>()
}
